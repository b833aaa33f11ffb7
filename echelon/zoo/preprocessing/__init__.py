"""From a picture as it is stored to what a model is shown: cropping and resizing here, normalizing on the device."""

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
