"""The mathematics of learning from groups of completions: tensors and numbers only. Floor 1.

    batch          completions ──▶ one flat batch of tokens
    overlong       lengths ──▶ what is taken off rewards near the token limit
    advantages     rewards of a group ──▶ one advantage per completion
    gae            rewards and values of tokens ──▶ one advantage per token
    correction     trainer and engine log-probs ──▶ one weight per token
    aggregation    how tokens, rows and prompts count ──▶ one scale per token
    losses, kl     log-probs ──▶ one loss per token, which `shardloop.objective` sums up
    packing        which rank trains which sequence, in which row
    conventions    all of these choices on one worked example

Settings come as plain arguments; no file here knows of a process group or a model.
"""
