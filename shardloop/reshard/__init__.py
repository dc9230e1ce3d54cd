"""Reshard: plan, prove, cost and carry out the way from one layout to another. Floors 1 and 3.

plan         the plan: for each tensor class one join per dim              floor 1
join         which rows of two tables overlap                              floor 1
flow         the words of a plan: flows, runs, transfers, views            floor 1
turns        one rank's transfers, and which holder sends                  floor 1
verify       the proof of a plan                                           floor 1
checks       the part of the proof that concerns one dim                   floor 1
cost         bytes that a plan moves, and the least possible               floor 1
inprocess    carries a plan out for simulated ranks                        floor 1
bind         do live tensors fit a layout                                  floor 1
buckets      streams of elements cut into messages                         floor 1
fingerprint  equal on both sides of a transfer, without a gather           floor 1
p2p          carries a plan out between processes                          floor 3
gather       the same, naively: the reference                              floor 3
"""
