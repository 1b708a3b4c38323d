"""HTTP: listening, connections and their limits, routes, authentication and TLS.

Invariant: whatever comes in over the network costs bounded memory and time, and never another client's answer.
"""
