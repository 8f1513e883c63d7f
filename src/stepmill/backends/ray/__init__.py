"""Workers on the machines of a Ray cluster. One actor per node hosts a local backend.

    Pool ──► slab ──► RayBackend ──► TCP connection ──────────► NodeHost ──► slab of the node ──► workers
                      one thread      one message per node       a local backend: process, thread or kernel

options      `stepmill.spec.ray_options`
cluster      connects to Ray, finds machines, makes actors: the only module that imports Ray for the pool
backend      the backend: plans nodes, starts and restarts workers, serves calls
node_link    the pool's link to one node: exchanges, their answers, pings
stream       the TCP connection of a link
handshake    the proofs that both ends of a connection give before they use it
node_host    the class of the actor
host_backends  the local backends that run the envs of a node
messages     the messages between a pool and its nodes
"""
