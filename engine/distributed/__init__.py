"""A model on several machines: each machine's ranks are threads in one process.

Machine 0 has the scheduler and the sampler; the others follow its orders. Only
`engine.hosts.machines` imports this package.
"""
