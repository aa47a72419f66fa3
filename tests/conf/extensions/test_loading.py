"""How plugins are named and what they may hold: each mistake is one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, MissingConfigException

from conf.answers.help import page_instead
from conf.entry import compose
from conf.extensions.choices import offer_choices
from conf.extensions.loading import load
from conf.extensions.using import REGISTRIES, Bound, of_checkpoint, with_plugins
from conf.failures import ConfigError, in_one_sentence
from conf.schema import CHOICES, TrainConfig

TYPED = """
from dataclasses import dataclass, field
from enum import Enum
from plugins import augmentation, loss, optimiser
class Kind(Enum):
    few = 1
    many = 2
@dataclass
class Range:
    low: float = 0.1  # the lower end
@dataclass
class Typed:
    count: int  # how often
    range: Range = field(default_factory=Range)
    kind: Kind = Kind.few  # which
    sides: list[int] = field(default_factory=list)
    limit: float | None = None
@augmentation("typed", Typed)
def change(sample, generator, options): ...
@loss("odd")
class Loss: ...
@optimiser("slow", momentum=0.5)
class Slow: ...
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A plugin in a folder with a space and letters that are not ASCII."""
    (tmp_path / "my plügins").mkdir()
    path = tmp_path / "my plügins" / "mine-1.py"
    path.write_text(TYPED)
    return path


def composed(*words: str) -> TrainConfig:
    return compose("train", TrainConfig, ["data=shapes", *words])


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ([], "count", 3),
        (["plugin.typed.range.low=2"], "range", {"low": 2.0}),
        (["plugin.typed.kind=many"], "kind", "many"),
        (["plugin.typed.sides=[1,2]"], "sides", [1, 2]),
        (["plugin.typed.limit=1"], "limit", 1.0),
        (["plugin.typed.limit=null"], "limit", None),
        (["plugin.typed={range:{low:4}}"], "range", {"low": 4.0}),
    ],
)
def test_options_of_each_type_are_read(words: list[str], field: str, value: object, mine: Path) -> None:
    assert composed(f'plugins=["{mine}"]', "plugin.typed.count=3", *words).plugin["typed"][field] == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plugin.typed.sides=[]"], "plugin.typed.count has no value. fix: give plugin.typed.count="),
        (["plugin.typed.count=x"], "plugin.typed.count: Value 'x' of type 'str'"),
        (["plugin.typed.count=1", "plugin.typed.kind=lots"], "plugin.typed.kind: Invalid value 'lots'"),
        (["plugin.typed.count=1", "plugin.typed.range.lo=1"], "did you mean plugin.typed.range.low?"),
        (["plugin.typed.count=1", "plugin.typed.range=7"], "7 is no value of Range, a section. fix: "),
        (["plugin.typed=7"], "plugin.typed holds options. fix: plugin.typed.<option>=..."),
    ],
)
def test_a_wrong_option_is_named(words: list[str], said: str, mine: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(f'plugins=["{mine}"]', *words)
    assert said in str(refused.value)


def test_help_lists_options_without_a_value_and_nested_ones(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine.write_text(f"print('at import')\n{TYPED}")
    page = page_instead("train", "train.py", TrainConfig, ["--help", f'plugins=["{mine}"]', "plugin.typed.range.low=3"])
    lines = [" ".join(line.split()) for line in page.splitlines()]
    for line in (
        "plugin.typed.count= how often (integer)",
        "plugin.typed.kind=few which (few, many)",
        "plugin.typed.range.low=3.0 the lower end (number)",
    ):
        assert line in lines
    assert capsys.readouterr() == ("", "at import\n")


@pytest.mark.parametrize("by", ["path", "name", "named folder"])
def test_an_experiment_names_plugins_with_their_loss_and_optimiser(by: str, mine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my conf"
    (folder / "experiment").mkdir(parents=True)
    file = folder / "experiment" / "own.yaml"
    chosen = "[override /data: shapes, override /loss: odd, override /optim: slow]"
    head, options = "# @package _global_\n", "plugin: {typed: {count: 3}}\noptim: {lr: 0.5}\n"
    file.write_text(f"{head}defaults: {chosen}\nplugins: ['{mine}']\n{options}")
    search = f'hydra.searchpath=["file://{folder}"]'
    words = [f'experiment="{file}"'] if by == "path" else ["experiment=own", search]
    whole = compose("train", TrainConfig, words)
    assert (whole.loss.name, whole.optim.name, whole.optim.momentum, whole.optim.lr) == ("odd", "slow", 0.5, 0.5)
    file.write_text(f"{head}defaults: {chosen}\n{options}")  # the list of the command line comes first
    assert compose("train", TrainConfig, [*words, f'plugins=["{mine}"]']).plugins == [str(mine)]
    with pytest.raises(MissingConfigException) as refused:
        compose("train", TrainConfig, words)
    assert "no choice loss=odd" in (in_one_sentence(refused.value, TrainConfig, words) or "")


def test_a_sweep_over_experiments_offers_what_each_job_needs(tmp_path: Path) -> None:
    """Jobs run one after another in one process, which composes each just before."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"import plugins\n@plugins.loss('{name}_loss')\nclass A: ...\n")
        (tmp_path / f"{name}.yaml").write_text(f"plugins: ['{tmp_path / f'{name}.py'}']\n")
    offer_choices([f"experiment={tmp_path / 'a.yaml'},{tmp_path / 'b.yaml'}"])
    with_plugins({"plugins": [str(tmp_path / "a.py")], "plugins_sha256": {}, "plugin": {}})
    assert {"a_loss.yaml", "b_loss.yaml"} <= ConfigStore.instance().repo["loss"].keys()
    assert "a_loss" in CHOICES["loss"] and "b_loss" not in CHOICES["loss"]
    (tmp_path / "b.yaml").write_text("# @package _global_\nplugins: b.py\n")
    with pytest.raises(ConfigCompositionException, match="full_key: plugins"):
        composed(f"experiment={tmp_path / 'b.yaml'}")


def test_a_plugin_s_text_counts_not_what_python_cached(mine: Path) -> None:
    """Another text of the same length within one second, as an editor or a test writes it."""
    first = load(str(mine))
    part = first.parts[1]
    assert Bound(first, part, None).identity != Bound(replace(first, sha256="0"), part, None).identity
    mine.write_text(TYPED.replace("0.5", "0.7"))
    second = load(str(mine))
    assert [part.more for part in (first.parts[2], second.parts[2])] == [{"momentum": 0.5}, {"momentum": 0.7}]


WRONG: dict[str, tuple[str, str]] = {
    "nothing": ("x = 1", "registers nothing"),
    "a bug": ("x = 1\nraise KeyError('y')", "failed in line 3 (KeyError: 'y')"),
    "no Python": ("def", "failed in line 2 (SyntaxError"),
    "a relative import": ("from . import other", "failed in line 2 (ImportError"),
    "an exit": ("import sys\nsys.exit('bye')", "failed in line 3 (SystemExit: bye)"),
    "a name in use": ("@plugins.activation('mish')\nclass A: ...", "the activation mish exists already"),
    "a section in use": ("@plugins.layer('conv')\nclass A: ...", "the layer conv exists already"),
    "an odd name": ("@plugins.loss('My Loss')\nclass A: ...", "lower-case letters"),
    "no dataclass": ("@plugins.loss('mine', int)\nclass A: ...", "must be a dataclass"),
    "twice": ("@plugins.loss('mine')\n@plugins.loss('mine')\nclass A: ...", "has mine twice"),
    "two kinds": ("@plugins.loss('mine')\n@plugins.logger('mine')\nclass A: ...", "has mine twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plugin_is_one_sentence(case: str, tmp_path: Path) -> None:
    text, said = WRONG[case]
    (tmp_path / "wrong.py").write_text(f"import plugins\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        composed(f"plugins=[{tmp_path / 'wrong.py'}]")
    assert said in str(refused.value) and "fix: " in str(refused.value)


@pytest.mark.parametrize("kind", ["loss", "optimiser"])
def test_a_part_that_cannot_be_made_is_one_sentence(kind: str, tmp_path: Path) -> None:
    text = f"import plugins\n@plugins.{kind}('bad')\nclass Bad:\n    def __init__(self):\n        raise KeyError('a')\n"
    (tmp_path / "bad.py").write_text(text)
    composed(f"plugins=[{tmp_path / 'bad.py'}]")
    with pytest.raises(ConfigError, match=rf"bad.py: {kind} bad failed in line 5 \(KeyError: 'a'\). fix: correct it"):
        resolve_name(REGISTRIES[kind])["bad"]()


@pytest.mark.parametrize("given", ["two", "two/", "two/__init__.py"])
def test_a_package_goes_by_its_entry_point(given: str, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "__init__.py").write_text(TYPED)
    with pytest.raises(ConfigError, match=r"two.* is a package. fix: one .py file, or an entry point of hydra_"):
        composed(f"plugins=[{tmp_path}/{given}]")


def test_an_installed_package_is_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts in the package and in a module that it imports by its own name; all its text counts."""
    package, about = tmp_path / "bent_parts", tmp_path / "bent_parts-1.0.dist-info"
    for folder in (package, about):
        folder.mkdir()
    part = "import plugins\n@plugins.loss('{}')\nclass A: ...\n"
    (package / "__init__.py").write_text(part.format("first") + "from bent_parts import more\n")
    (package / "more.py").write_text(part.format("second"))
    (package / "inner.py").write_text(part.format("third"))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bent-parts\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[hydra_yolov3_spp.plugins]\nbent = bent_parts\ninner = bent_parts.inner\nlost = gone.inner\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    whole = composed("plugins=[bent]", "loss=second")
    assert whole.plugins == ["bent"] and whole.loss.name == "second"
    with pytest.raises(
        ConfigError, match=r"no installed package has the entry point bend of .*, there are bent, inner, lost\."
    ):
        composed("plugins=[bend]")
    with pytest.raises(ConfigError, match=r"the entry point lost names gone\.inner, which is missing"):
        composed("plugins=[lost]")
    for given, loss in (("bent", "first"), ("inner", "third")):  # a change beside what registers counts, too
        before = composed(f"plugins=[{given}]", f"loss={loss}").plugins_sha256
        (package / "more.py").write_text(part.format(f"other_{given}"))
        with pytest.raises(ConfigError, match=f"plugin {given} has changed: .* fix: the file as it was, or "):
            with_plugins({"plugins": [given], "plugins_sha256": before, "plugin": {}})
    assert composed("plugins=[bent]", "loss=other_inner").loss.name == "other_inner"


def test_a_file_that_a_plugin_imports_from_beside_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also through another one; what is not imported, and modules of this project, do not."""
    monkeypatch.syspath_prepend(tmp_path)
    mine = tmp_path / "with_rates.py"
    mine.write_text("import plugins, rates\n@plugins.optimiser('fast', momentum=rates.MOMENTUM)\nclass A: ...\n")
    (tmp_path / "rates.py").write_text("from rate_table import MOMENTUM\n")
    seen = []
    for text in ("MOMENTUM = 0.25", "MOMENTUM = 0.125"):
        (tmp_path / "rate_table.py").write_text(text)
        seen.append(load(str(mine)))
        (tmp_path / "plugins.py").write_text("")
        (tmp_path / "unused.py").write_text("")
        assert load(str(mine)) is seen[-1]
    assert [plugin.parts[0].more for plugin in seen] == [{"momentum": 0.25}, {"momentum": 0.125}]
    assert seen[0].sha256 != seen[1].sha256


def test_what_is_named_beside_a_checkpoint_changes_that_alone() -> None:
    saved = {"plugins": ["a.py"], "plugins_sha256": {"a": "1"}, "plugin": {"p": {"range": {"low": 1, "high": 2}}}}
    given = {"plugins": ["b/a.py"], "plugins_sha256": {"a": "2"}, "plugin": {"p": {"range": {"low": 5, "high": 9}}}}
    for key, changed in (
        ("plugins", {"plugins": ["b/a.py"]}),
        ("plugins_sha256.a", {"plugins_sha256": {"a": "2"}}),
        ("plugin.p.range.low", {"plugin": {"p": {"range": {"low": 5, "high": 2}}}}),
        ("plugin.p", {"plugin": given["plugin"]}),
        ("train.seed", {}),
    ):
        assert of_checkpoint({"x": 1, **given}, saved, [key]) == {"x": 1, **saved, **changed}
    assert of_checkpoint(given, {}, ["plugins"]) == given, "converted weights, which name none"


def test_a_file_of_any_name_can_be_accepted_by_a_key(tmp_path: Path) -> None:
    file = tmp_path / "my-plügin v1.2.py"
    file.write_text(TYPED)
    (name,) = composed(f'plugins=["{file}"]', "plugin.typed.count=1").plugins_sha256
    assert name == "my_pl_gin_v1_2"
    composed(f'plugins=["{file}"]', "plugin.typed.count=1", f"plugins_sha256.{name}={load(str(file)).sha256}")


def test_two_plugins_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder, part in (("a", "one"), ("b", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"import plugins\n@plugins.loss('{part}')\nclass A: ...\n")
    (tmp_path / "other.py").write_text("import plugins\n@plugins.loss('one')\nclass A: ...\n")
    for files, name in ((("a/same.py", "b/same.py"), "same"), (("a/same.py", "other.py"), "one")):
        with pytest.raises(ConfigError, match=f"has {name} twice. fix: give each another name"):
            composed(f"plugins=[{','.join(str(tmp_path / file) for file in files)}]")
