"""An extension outside the package that uses the core's C interface, as a service embedding Pion would."""

from Cython.Build import cythonize
from setuptools import Extension, setup

from pion._core import get_include

setup(
    name="downstream",
    ext_modules=cythonize(
        [Extension("downstream", ["downstream.pyx"], include_dirs=[get_include()], extra_compile_args=["-std=gnu11"])]
    ),
)
