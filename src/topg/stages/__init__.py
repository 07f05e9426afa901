"""The three stages of a request: intake checks and tokenises, compute runs steps, output makes text.

They meet only in bounded queues.  `engine` connects them within one process.
"""
