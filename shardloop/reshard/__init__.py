"""Reshard: plan, prove and cost the way from one layout to another. Floor 1.

plan         who sends which box to whom: the door of planning
verify       the proof of a plan: the door of `proof/`
cost         bytes that a plan moves, and the least possible (loads)
inprocess    carries a plan out for simulated ranks
fingerprint  equal on both sides of a transfer, without a gather (copies)

How a plan is made:

agree        do the two models and the ranks fit
cross        tables multiplied, copies of a tied tensor as one
boxes        which boxes overlap, and their refinement
join         where two tables meet
members      groups of ranks: who holds, who wants
flow         the words: flows, runs, transfers
sides        one end of a flow, its ranks numbered
turns        which holder sends
lost         is everything still held, without the lost ranks
runs         one rank's list, as arrays
transfers    the same written out

`transport` carries plans out between processes.
"""
