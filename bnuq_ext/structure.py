"""What a module consists of, to put back what a forward has added: a model may install hooks or
submodules in its first one."""

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

OURS = "_bnuq_hook"  # attribute of a hook that this package sets for a while
_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # which ours are among
_BUFFERS = "_buffers"


class Structure:
    """The class of a module and the items of its tables: submodules, but for plain ones that are made
    anew (a pooling of the input's size), hooks but for ours, which any thread may set, parameters,
    and the names of buffers, which `State` puts back.

    A lazy layer becomes another one for good; what is traced has other tables than dicts.
    """

    def __init__(self, module: nn.Module):
        self.module, self.type = module, type(module)
        self.tables, self.ours = _listed(_tables(module))

    def changed(self) -> list[str]:
        """The names of what is not as it was, "__class__" for the class."""
        if not self.tables:
            return []
        found = [] if type(self.module) is self.type else ["__class__"]
        now, ours = self._now()
        for name, before in self.tables.items():
            if before or now[name]:  # most are empty
                if _marks(name, now[name], ours) != _marks(name, before, ours):
                    found.append(name)
        return found

    def _now(self) -> tuple[dict[str, list[tuple]], set[int]]:
        """The items of the same tables now, and the keys of hooks of ours, those gone too."""
        own = vars(self.module)
        now, ours = _listed({name: own[name] for name in self.tables})
        return now, ours | self.ours

    def restore(self) -> None:
        for name in self.changed():
            if name == "__class__":
                self.module.__class__ = self.type
            else:
                self._put_back(name, vars(self.module)[name])

    def _put_back(self, name: str, table: dict) -> None:
        """In the same table, to which handles of hooks refer, and item by item: meanwhile another
        thread may set a hook of ours, or remove one."""
        now, ours = self._now()
        old = {key: item for key, item in self.tables[name] if key not in ours}
        for key, _ in now[name]:
            if key not in old and key not in ours:
                table.pop(key, None)
        for key, item in old.items():
            if key not in table or name != _BUFFERS:
                table[key] = item
        if [key for key in [*table] if key in old] != [*old]:
            for key in old:
                table[key] = table.pop(key)


def _tables(module: nn.Module) -> dict[str, dict]:
    if isinstance(module, LazyModuleMixin):
        return {}
    own = vars(module)
    return {name: t for name in _TABLES if isinstance(t := own.get(name), dict)}


def _listed(tables: dict[str, dict]) -> tuple[dict[str, list[tuple]], set[int]]:
    """The items of tables, and the keys of hooks of ours, which are no other hook's: those listed,
    and those of a moment later, whose flags may be listed already."""
    items = {name: [*table.items()] if table else [] for name, table in tables.items()}
    hooks = [pair for n in _HOOKS if n in tables for pair in (*items[n], *tables[n].items())]
    return items, {key for key, hook in hooks if hasattr(hook, OURS)}


def _marks(name: str, items: list[tuple], ours: set[int]) -> list:
    if name == _BUFFERS:
        return [key for key, _ in items]
    return [(key, _mark(item)) for key, item in items if key not in ours]


def is_of_torch(module: nn.Module) -> bool:
    """Whether its class is one of torch.nn's own."""
    return type(module).__module__.startswith("torch.nn.")


def _mark(item) -> object:
    """What tells a hook or a submodule from another; of a module of torch's that holds nothing its
    settings."""
    if isinstance(item, nn.Module) and is_of_torch(item):
        if not any(vars(item)[name] for name in _TABLES):
            return type(item), repr(item)
    return id(item)
