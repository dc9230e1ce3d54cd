"""Engines: what draws completions from the policy. Floors 2 and 3.

base         the Engine protocol and the checks every engine makes                     floor 2
gate         which weights an engine has, and whether it updates or sleeps             floor 2
inverse_cdf  the inverse CDF of a large vocabulary, by blocks                          floor 2
sampling     counter-based noise and truncated sampling with log-probs                 floor 2
slots        the sequences in flight and their key/value cache                         floor 2
prefix       prompts computed once and shared by their samples                         floor 2
runner       prompts and single tokens through the decoder, into the slots             floor 2
stops        texts that end a completion                                               floor 2
weights      local tensors: filled from a state dict, checked, freed for a sleep       floor 2
scripted     an engine that answers from a function, for tests of loops                floor 2
local        our own tensor-parallel engine with continuous batching                   floor 3
"""
