"""Chunks of an image, read and compared with what was saved; no GPU is needed."""

import mmap
from collections.abc import Sequence

from cuckpt.storage.checksum import checksum_of
from cuckpt.storage.errors import ImageError
from cuckpt.storage.folder import OldImage
from cuckpt.storage.manifest import Chunk, Image, Stripe, parse
from cuckpt.storage.stripes import StripeFile, padded
from cuckpt.storage.threads import at_once


def opened(old: OldImage) -> Image:
    """Read the manifest of an image, and open its files.

    Parameters
    ----------
    old : OldImage

    Returns
    -------
    Image

    Raises
    ------
    ImageError
        If it is damaged, incomplete or of another version.
    OSError
        If it cannot be read.
    """
    image = parse(old.manifest, old.path)
    old.open_all({stripe.file: stripe.size for stripe in image.stripes})
    return image


def read_chunk(file: StripeFile, chunk: Chunk, view: memoryview) -> None:
    """Read a chunk; once more, past the cache, if it is not what was saved.

    Parameters
    ----------
    file : StripeFile
    chunk : Chunk
    view : memoryview
        Of bytes, at least so many as the chunk has when it is padded.

    Raises
    ------
    ImageError
        If it is not what was saved.
    OSError
        If it cannot be read.
    """
    for _ in range(2):
        found = file.read(chunk.place, view[: chunk.size])
        if found == chunk.size and (
            not chunk.checksum or checksum_of()(view[:found]) == chunk.checksum
        ):
            return
        file.forget(chunk.place, chunk.size)
    raise ImageError(
        f"{file.name} is damaged: what is at {chunk.place} is not what was saved"
        if found == chunk.size
        else f"{file.name} is damaged: it ends at {chunk.place + found}"
    )


def damages(image: OldImage, stripes: Sequence[Stripe], workers: int) -> list[str]:
    """Read all files, and tell what is wrong.

    Parameters
    ----------
    image : OldImage
        Whose files are open.
    stripes : sequence of Stripe
    workers : int
        How many files to read at the same time.

    Returns
    -------
    list of str
        One text for each file that is not what was saved.
    """
    wrong: dict[str, str] = {}

    def look(stripe: Stripe) -> None:
        longest = padded(max((chunk.size for chunk in stripe.chunks), default=1))
        view = memoryview(mmap.mmap(-1, longest))
        try:
            for chunk in stripe.chunks:
                read_chunk(image.file(stripe.file), chunk, view)
        except (ImageError, OSError) as error:
            wrong[stripe.file] = str(error)

    at_once(look, stripes, workers)
    return [wrong[stripe.file] for stripe in stripes if stripe.file in wrong]
