"""Finds engines for a load: which mode, how many of each side, at which TP, under which policy.

It searches by simulation (`rayk.simulate`) over cost tables (`rayk.costs`), and holds predictions against
runs.
"""
