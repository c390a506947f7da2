"""A model over several machines: the ranks of each as threads of one process, and what crosses.

Machine 0 has scheduler and sampler, and the others follow its orders. In the engine, only
`engine.hosts.machines` imports it.
"""
