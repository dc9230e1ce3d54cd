"""The mathematics of learning from groups of completions: tensors and numbers only. Floor 1.

    batch        completions ──▶ one flat batch of tokens
    advantages   rewards of a group ──▶ one advantage per completion
    correction   trainer and engine log-probs ──▶ one weight per token
    losses, kl   log-probs ──▶ loss, summed over tokens and divided by a global count
    packing      which rank trains which sequence, in which row

Settings come as plain arguments; no file here knows of a process group or a model.
"""
