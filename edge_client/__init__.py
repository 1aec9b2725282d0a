"""What runs on the device: protocol, methods, training, client. Imports no torch, no compiler needed.

Other packages import from the modules themselves; this page only names the two things a device's own
program needs: :class:`edge_client.client.Client` and :mod:`edge_client.errors`.
"""
