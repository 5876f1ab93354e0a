"""What can be wrong with an image."""


class ImageError(RuntimeError):
    """An image is damaged, incomplete, of another version, or of something else."""


class ImageInUseError(ImageError):
    """Somebody writes an image there, or reads the one that is to be changed."""
