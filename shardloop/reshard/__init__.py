"""Reshard: plan, prove, cost and carry out the way from one layout to another.

plan, verify, cost and inprocess are mathematics (floor 1); p2p and gather move tensors between
processes (floor 3).
"""
