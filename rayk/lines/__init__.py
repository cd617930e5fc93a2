"""Lines between the processes of a server: calls and streams over TCP, with next to nothing in between.

They know nothing of what they carry, nor of Ray, which starts the processes and says where they are.
"""
