"""Carries out proved plans between processes. Called by `shardloop.weight_sync`. Floor 3.

base      what all share: the protocol, the report, the checks before a byte moves
bind      do live tensors fit a layout
buckets   one rank's share of a plan, cut into messages
p2p       messages between pairs of ranks
relay     a chain through replicas: each hands on what it receives
shm       memory that the ranks of one host share (segment, channel)
delta     only the elements that changed since the last update (mail)
gather    whole tensors: the naive reference
"""
