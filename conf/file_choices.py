"""Choices of a group that are paths: ``data=/x/cats.yaml``, ``experiment=mine.yaml``.

Hydra asks its sources for a choice one after another. FileChoices is the first of them and has the
words with a slash or a suffix, if there is such a file or folder. Bare words are names of a group,
whatever lies in the current folder.

An experiment that a user names is the user's own words, with all that Hydra can do. A data set
often comes from others: its file sets ``data.*`` and nothing else, and refers to nothing.
"""

import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from conf import CONF_DIR, ConfigError
from conf.messages import is_path
from data.config import DataConfig
from data.errors import DataError, shown
from data.set_files import YAML_SUFFIXES, load_yaml, recognise

OURS = {"defaults", "format"}  # keys of a data set's options, which no data.yaml has


class FileChoices(ConfigSource):
    """Files and folders as choices of the groups ``data`` and ``experiment``."""

    @staticmethod
    def scheme() -> str:
        """How the search path names this source."""
        return "choice"

    def load_config(self, config_path: str) -> ConfigResult:
        """The options of a choice. Raises DataError for a file that holds none."""
        group, _, word = config_path.partition("/")
        path, package = Path(word).expanduser(), None
        if group == "data":
            content = _of_data(path)
        else:
            package = self._get_header_dict(path.read_text(encoding="utf-8"))["package"] or "_global_"
            content = load_yaml(path)
        # Hydra looks for plain names beside the file; they are those of the group.
        content["defaults"] = [_in_group(entry, group) for entry in content.get("defaults", [])]
        config = OmegaConf.create(content)
        return ConfigResult(provider=self.provider, path=config_path, config=config, header={"package": package})

    def is_config(self, config_path: str) -> bool:
        """Whether a choice is the path of something that its group can be."""
        group, _, word = config_path.partition("/")
        path = os.path.expanduser(word)
        if group == "experiment":
            return path.lower().endswith(YAML_SUFFIXES) and os.path.isfile(path)
        return group == "data" and is_path(word) and os.path.exists(path)

    def is_group(self, config_path: str) -> bool:
        """Whether it is a group: there are none of its own."""
        return False

    def available(self) -> bool:
        """Whether the source can be read: always."""
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The choices to propose: none, since all files are."""
        return []


class _OurPath(SearchPathPlugin):
    """Puts FileChoices into each search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend("paths", "choice://")


def register_file_choices() -> None:
    """Let all that Hydra composes from now on in this process take paths for choices."""
    Plugins.instance().register(FileChoices)
    Plugins.instance().register(_OurPath)


def _of_data(path: Path) -> dict[str, Any]:
    """The options ``data.*`` of a data set's place. Raises DataError for a file with others."""
    is_yaml = path.is_file() and path.suffix.lower() in YAML_SUFFIXES
    content = load_yaml(path) if is_yaml else {}
    if OURS & content.keys():
        keys, chosen = {"defaults", *(field.name for field in fields(DataConfig))}, content.get("defaults", [])
        if other := next((key for key in content if key not in keys), None):
            raise DataError(f"{path} has the key {other}, which is no option of data. fix: leave it out")
        if not isinstance(chosen, list) or not all(
            isinstance(one, str) and re.fullmatch(r"[\w-]+", one) for one in chosen
        ):
            raise DataError(f"{path} has other defaults than names of data sets. fix: defaults: [coco], or none")
    else:
        recognised = recognise(path)
        usual = load_yaml(CONF_DIR / "data" / f"{recognised['format']}.yaml")
        content = {**usual, **recognised}
    check_values(content, str(path))
    return content


def check_values(values: Any, source: str, depth: int = 100) -> None:
    """Raise ConfigError for a value that is not plain, such as the reference ``${oc.env:HOME}``."""
    if isinstance(values, dict | list) and depth > 0:
        for value in [*values, *values.values()] if isinstance(values, dict) else values:
            check_values(value, source, depth - 1)
    elif type(values) not in (str, int, float, bool, type(None)) or (type(values) is str and "${" in values):
        fix = "fix: the value itself"
        raise ConfigError(f"{source} holds {shown(values)}, and only a command line may refer to values. {fix}")


def _in_group(entry: Any, group: str) -> Any:
    """An entry of a defaults list, with a plain name as one of ``group``."""
    if isinstance(entry, str) and entry != "_self_" and not entry.startswith("/"):
        return f"/{group}/{entry}@_here_"
    return entry
