"""What a module consists of, to put back what a forward has added: a model may install hooks or
submodules in its first one."""

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

OURS = "_bnuq_hook"  # attribute of a hook that this package sets for a while
_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
_OF_TENSORS = ("_parameters", "_buffers")


class Structure:
    """The class of a module and the items of its tables: submodules, hooks but for ours, which any
    thread may set, and the names of parameters and buffers, for FSDP exchanges the tensors.

    A lazy layer becomes another one for good; what is traced has other tables than dicts.
    """

    def __init__(self, module: nn.Module):
        self.module, self.type, self.ours = module, type(module), _ours(module)
        self.tables = {n: [*t.items()] if t else [] for n, t in _tables(module).items()}

    def changed(self) -> list[str]:
        """The names of what is not as it was, "__class__" for the class."""
        if not self.tables:
            return []
        found = [] if type(self.module) is self.type else ["__class__"]
        now, ours = vars(self.module), self.ours | _ours(self.module)
        for name, before in self.tables.items():
            if before or now[name]:  # most are empty
                if _marks(name, [*now[name].items()], ours) != _marks(name, before, ours):
                    found.append(name)
        return found

    def restore(self) -> None:
        for name in self.changed():
            if name == "__class__":
                self.module.__class__ = self.type
            else:
                self._put_back(name, vars(self.module)[name])

    def _put_back(self, name: str, table: dict) -> None:
        """The same table with its old items: handles of hooks refer to it."""
        now = dict(table)
        ours = self.ours | _ours(self.module)
        old = {k: item for k, item in self.tables[name] if k not in ours or k in now}
        if name in _OF_TENSORS:
            old = {key: now.get(key, item) for key, item in old.items()}
        table.clear()
        table.update(old | {key: item for key, item in now.items() if key in ours})


def _tables(module: nn.Module) -> dict[str, dict]:
    if isinstance(module, LazyModuleMixin):
        return {}
    own = vars(module)
    return {name: t for name in _TABLES if isinstance(t := own.get(name), dict)}


def _ours(module: nn.Module) -> set[int]:
    """The keys of hooks of ours, which are no other hook's."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    if not (before or after):
        return set()
    return {key for key, hook in [*before.items(), *after.items()] if hasattr(hook, OURS)}


def _marks(name: str, items: list[tuple], ours: set[int]) -> list:
    if name in _OF_TENSORS:
        return [key for key, _ in items]
    return [(key, id(item)) for key, item in items if key not in ours]
