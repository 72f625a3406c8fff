"""A node that several processes share: messages over a Unix socket, the pool as shared memory."""
