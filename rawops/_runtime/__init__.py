"""From a ``.cu`` file to a launch: sources, NVRTC, cache, devices, arrays and argument checks."""
