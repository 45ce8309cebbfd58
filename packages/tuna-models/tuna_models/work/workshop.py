"""Where a model is read, planned and linked: a folder, and a child that works in it.

An import and the builds after it share them, so that TVM is imported once, and what was read is
kept.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from tuna.api.services import artifacts_of_models
from tuna.errors import NotFound
from tuna_models.limits import ModelLimits
from tuna_models.process import ModelProcess
from tuna_models.work import files
from tuna_models.work.store import StoredModel


class Workshop:
    """A folder and a child, made when they are needed, and ended with a `with` block of this."""

    def __init__(
        self,
        parent: Path | None = None,
        prefix: str = "tuna-",
        *,
        limits: ModelLimits | None = None,
    ) -> None:
        """The folder is in `parent`, by default that of temporary files; `limits` are the child's,
        by default those of the settings."""
        self._stack = contextlib.ExitStack()
        self._limits = limits
        self._parent, self._prefix = parent, prefix
        self._folder: Path | None = None
        self._process: ModelProcess | None = None
        self._files: dict[str, Path] = {}

    @property
    def folder(self) -> Path:
        """The folder, to which the child may write."""
        if self._folder is None:
            made = tempfile.TemporaryDirectory(
                dir=self._parent, prefix=self._prefix, ignore_cleanup_errors=True
            )
            self._folder = Path(self._stack.enter_context(made)).resolve()
        return self._folder

    def new_folder(self) -> tempfile.TemporaryDirectory[str]:
        """A folder within the folder, which ends before it; a fork of the child may still write."""
        return tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True)

    def process(self, target: str, model: str) -> ModelProcess:
        """The child, which has started to import TVM; `target` as `ModelProcess` has it."""
        if self._process is None:
            self._process = ModelProcess(
                target, model, writable=(self.folder,), limits=self._limits
            )
            self._stack.callback(self.end_process)
        self._process.start(model)
        return self._process

    def end_process(self) -> None:
        """End the child, which holds what it has read; another one starts when it is needed."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def keep(self, version: str, file: Path) -> None:
        """Keep the file of an import, which lies within the folder, for `file_of`."""
        self._files[version] = file

    def file_of(self, model: StoredModel) -> Path:
        """The model's file within the folder, with its weights where it looks for them; raises
        NotFound."""
        if model.version not in self._files:
            self._files[model.version] = self._lay_out(model)
        return self._files[model.version]

    def _lay_out(self, model: StoredModel) -> Path:
        kind = ".pt2" if model.manifest.of_torch else ".onnx"
        path = self.folder / model.version / f"{model.version[:12]}{kind}"
        artifacts = artifacts_of_models()
        try:
            files.write(path, artifacts.get(model.manifest.file))
            for place, digest in model.manifest.data.items():
                files.write(path.parent / place, artifacts.get(digest))
        except KeyError:
            raise NotFound(
                f"The file of the model {model.name} is not in the artifact store any more.",
                hint="import it again",
            ) from None
        return path

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
