"""The map of the model: the device of each tensor, and pins that put parts on a device.

Imports no other subject of the app but `split`.
"""
