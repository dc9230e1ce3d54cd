"""Sparse weight updates: only the elements whose bits changed, exact to the bit. Floor 1.

After an optimizer step at the learning rates of reinforcement learning most bfloat16 weights keep
their bits: the step is smaller than the distance to the next bfloat16 number. Who holds the old
weights needs only the others. `transport.delta` carries plans out so.

digest     64 bits that name the contents of a tensor
gaps       positions as distances, a byte each
codec      a delta of two tensors: encode, apply, its bytes
source     the sender's memory: what the other side was last sent
density    how many elements will change, predicted
"""
