"""What Keras 3 gets wrong under a strategy with several replicas, one noun a module.

Each ``correct_*`` function replaces a few functions of Keras through the :data:`Patch` it is given and says why; the
table and the context manager that apply them are in :mod:`tfdist.strategies.keras_compat`.
"""
