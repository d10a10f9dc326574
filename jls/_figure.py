# SPDX-License-Identifier: Apache-2.0
"""The figure that the pictures of jls are drawn on.

Matplotlib is imported here, and this module only when something is drawn.
"""

import io

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A figure that a notebook shows even if pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()
