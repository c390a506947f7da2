"""A model on several machines: each machine's ranks are threads of one process.

Machine 0 has the scheduler and the sampler, and the others follow its orders. Only
`engine.hosts.machines` imports this package.
"""
