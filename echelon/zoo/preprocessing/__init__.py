"""Preprocessing of images: cropping and resizing on the host, normalization on the device."""

from echelon.zoo.preprocessing.normalize import Normalize
from echelon.zoo.preprocessing.pictures import ArrayPicture, EncodedPicture, Picture, Pixels
from echelon.zoo.preprocessing.recipes import PREPROCESSINGS, Preprocessing, Recipe, preprocessing_of

__all__ = [
    "PREPROCESSINGS",
    "ArrayPicture",
    "EncodedPicture",
    "Normalize",
    "Picture",
    "Pixels",
    "Preprocessing",
    "Recipe",
    "preprocessing_of",
]
