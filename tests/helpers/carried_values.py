"""Values that a loop of a kernel carries from turn to turn and that Triton drops without a word.

Two faults of Triton 3.6 and 3.7, in Triton's language and in Gluon. Neither Triton's interpreter nor the emulator can
show them: both run the source of a kernel, and the source is right.

- What a `for` loop carries, and uses only as a bound of a `range` inside of it, keeps its first value: the elimination
  of dead arguments does not count the bounds of inner loops as uses. `dropped_bounds` finds such values.
- A variable that enters a loop as the same value as another one, and takes the value of the other one inside, is not
  carried at all: the front end recognizes what a loop changes by comparing values after a trial run of its body.
  `uncarried_in` finds such variables.
"""

import re
import tempfile
from dataclasses import dataclass, field

_VALUE = re.compile(r"%[\w$.]+(?:#\d+)?")
_OPERATION = re.compile(r"(?:(%[\w$.]+)(?::(\d+))? = )?\"?([a-z_]+\d*(?:\.[\w.]+)*)\"?")
_LOOP = re.compile(r"scf\.for (%\S+) = (%\S+) to (%\S+) step (%\S+)")
_TERMINATORS = ("yield", "return")
# They have results, and effects besides: nobody needs to use the results.
_EFFECTS = re.compile(r"atomic|elementwise_inline_asm|async_copy|copy_global|scf\.while|print|assert")


@dataclass(eq=False)
class Operation:
    """An operation of a module, and those in its regions."""

    name: str
    results: list[str]
    operands: list[str]
    inside: list["Operation"] = field(default_factory=list)
    bounds: list[str] = field(default_factory=list)  # of a loop
    arguments: list[str] = field(default_factory=list)  # what a loop carries

    def walk(self):
        """All operations inside, except for partitions, whose values have names of their own."""
        for each in self.inside:
            yield each
            if not each.name.startswith("partition"):
                yield from each.walk()

    def has_effect(self) -> bool:
        """Whether it does something besides computing its results."""
        return bool(_EFFECTS.search(self.name)) or not (self.results or self.bounds or self.name.endswith(_TERMINATORS))

    def yields(self) -> list[list[str]]:
        return [each.operands for each in self.inside if each.name == "scf.yield"]


def dropped_bounds(source: str) -> list[str]:
    """The values that loops of a kernel carry and Triton drops, given what Triton's front end made of the kernel."""
    found, scopes = [], [parse(inlined(source))]
    for scope in scopes:  # which grows
        operations = list(scope.walk())
        scopes += [each for each in operations if each.name.startswith("partition")]
        used = {value for each in operations for value in each.operands}
        for loop in operations:
            dropped = _live(loop, used, bounds=True) - _live(loop, used, bounds=False) if loop.arguments else set()
            found += [f"{each} of {loop.name} over {loop.bounds}" for each in loop.arguments if each in dropped]
    return found


def inlined(source: str) -> str:
    """The module with all functions in one, by MLIR's own simplifications, which count every use."""
    from triton._C.libtriton import ir, nvidia, passes

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(source)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    manager = ir.pass_manager(context)
    passes.common.add_inliner(manager)
    manager.run(module, "inline")
    return module.str_nodebug()


def parse(text: str) -> Operation:
    """The operations of a module, nested as their regions are."""
    stack = [module := Operation("module", [], [])]
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("}"):
            before = stack.pop()
            if line.endswith("{"):  # another region of the same operation
                stack.append(before)
            continue
        match = _OPERATION.match(line)
        if not match or line.startswith(("#", "^", "module")):
            if line.endswith("{"):
                stack.append(stack[-1])
            continue
        name, count, kind = match.groups()
        results = [] if not name else [f"{name}#{i}" for i in range(int(count))] if count else [name]
        operation = Operation(kind, results, _VALUE.findall(line[match.end() :]))
        if loop := _LOOP.search(line):
            carried = re.findall(r"(%\S+) = (%[^\s,)]+)", line.partition("iter_args(")[2])
            operation.bounds = list(loop.groups()[1:])
            operation.arguments = [argument for argument, _ in carried]
            operation.operands = [*operation.bounds, *(initial for _, initial in carried)]
        stack[-1].inside.append(operation)
        if line.endswith(("{", "({")):
            stack.append(operation)
    return module


def _live(loop: Operation, used: set[str], *, bounds: bool) -> set[str]:
    """The values in a loop that something needs; with or without those that only bounds of inner loops need."""
    inner = list(loop.walk())
    defined = {result: each for each in inner for result in each.results}
    carried = {argument: (each, i) for each in (loop, *inner) for i, argument in enumerate(each.arguments)}
    live: set[str] = set()
    queue = [each for result, each in zip(loop.results, *loop.yields(), strict=True) if result in used]
    for each in inner:
        if each.bounds:
            queue += each.bounds if bounds else []
        elif each.has_effect() or any(below.has_effect() for below in each.walk()):
            queue += each.operands
    while queue:
        value = queue.pop()
        if value in live:
            continue
        live.add(value)
        if value in carried:
            owner, i = carried[value]
            queue += [owner.operands[len(owner.bounds) + i], *(each[i] for each in owner.yields())]
        elif each := defined.get(value):
            i = each.results.index(value)
            if each.bounds:
                queue.append(each.operands[len(each.bounds) + i])
            else:
                queue += each.operands
            queue += [of[i] for of in each.yields()]
    return live


def uncarried_in(binary, target, launched: dict) -> list[str]:
    """The variables that loops of a kernel should carry; its front end runs once more, since Triton caches kernels."""
    from triton._C.libtriton import ir
    from triton.compiler import code_generator
    from triton.compiler.compiler import make_backend

    generator = code_generator.CodeGenerator
    find = generator._find_carries
    found = []

    def find_and_record(self, node, liveins, *args, **kwargs):
        assigned = set()  # in the trial run of the body
        outer = self.set_value  # perhaps that of the trial run of a loop around this one

        def set_value(name, value):
            assigned.add(name)
            outer(name, value)

        self.set_value = set_value
        names, *rest = find(self, node, liveins, *args, **kwargs)
        self.set_value = outer
        handles = {name: _handles(code_generator, value) for name, value in liveins.items()}
        carried = {handle for name in names for handle in handles[name]}
        for name in sorted(assigned & {*handles} - {*names}):
            if any(handle in carried for handle in handles[name]):
                found.append(f"{name} of the loop in line {node.lineno} of {self.function_name}")
        return names, *rest

    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(launched)  # of the launch: num_warps of the metadata counts all groups
    generator._find_carries = find_and_record
    try:
        binary.src.make_ir(
            target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
        )
    finally:
        generator._find_carries = find
    return found


def _handles(code_generator, value) -> list:
    is_value = code_generator._is_triton_value(value)
    return [handle.id() for handle in code_generator.flatten_values_to_ir([value])] if is_value else []
