"""What can be wrong with an image."""


class ImageError(RuntimeError):
    """An image is damaged, incomplete, of another version, or of something else."""
