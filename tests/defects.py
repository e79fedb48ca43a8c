#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes copies of the library's sources with deliberate defects, which the fuzzers have to find.

    defects.py FOLDER SOURCE...    writes FOLDER/lockstep/SOURCE with its defects, for each of lockstep/SOURCE

Each defect has a name, a source, a text that stands there once, and the text that takes its place. `defect` in that text is true
where a test has set present_defect() (tests/defects.h) to the name. A text that is not there once any more is an error: say here
how the source does it now.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "lockstep"
DEFECTS = {
    "barrier 1 is left out": (
        "step/published.cc", "    agreement_.end_backward();", "    if (!defect) agreement_.end_backward();"),
    "barrier 2 is left out": (
        "step/step_agreement.cc", "if (memory_->size() > 1) {", "if (memory_->size() > 1 && !defect) {"),
    "the hash of the settings is stale": (
        "step/step_agreement.cc", "hash_of(settings)));", "defect ? 0 : hash_of(settings)));"),
    "the number of backward() is dropped": (
        "step/published.cc", "backwards = backwards_per_step();", "backwards = defect ? 1 : backwards_per_step();"),
    "the number of backward() is wrong in join()": (
        "step/published.cc", "    const auto least = [", "    if (defect) return row(first_row_).backwards;\n    const auto least = ["),
    "dropped gradients count": (
        "step/published.cc", "if (!nothing && !watch_.dropped())", "if ((!nothing && !watch_.dropped()) || defect)"),
    "unused parameters get a gradient": (
        "step/buckets.cc", "return *count++ == 0;", "return *count++ == 0 && !defect;"),
    "samples are not weighted": (
        "step/buckets.cc", "return batches_.weight() / scale_;", "return (defect ? 1 : batches_.weight()) / scale_;"),
    "rows of an embedding are not weighted": (
        "step/buckets.cc", "? batches_.weight() / totals_", "? (defect ? 1 : batches_.weight()) / totals_"),
    "the loss scale is dropped": (
        "step/update/flat_update.cc", "scale = step.loss_scale.value_or(1);", "scale = defect ? 1 : step.loss_scale.value_or(1);"),
    "an overflow is not seen": (
        "step/update/flat_update.cc", "!std::isfinite(gradient_norm_)", "!defect && !std::isfinite(gradient_norm_)"),
    "a norm of one slice": (
        "step/update/flat_update.cc", "for (size_t i = 0; i < chunks_.size(); ++i)\n      if (is_updated_",
        "for (size_t i = defect ? first_ : 0; i < (defect ? last_ : chunks_.size()); ++i)\n      if (is_updated_"),
    "layerwise rules are not clipped": (
        "step/update/flat_update.cc", "factor = clip_factor(step.clipping, gradient_norm_);",
        "factor = defect && step.rule.layerwise() ? 1 : clip_factor(step.clipping, gradient_norm_);"),
    "the trust ratio is dropped": (
        "step/update/flat_update.cc", "is_direction ? trust_", "is_direction && !defect ? trust_"),
    "a version is not marked": (
        "step/local_gradients.cc", "  release();", "  release();\n  if (defect) return;"),
    "an unfrozen parameter is accepted": (
        "step/guards/guards.cc", "    if (parameter.requires_grad())\n", "    if (parameter.requires_grad() && !defect)\n"),
    "the hash of the parameters is left out": (
        "step/guards/guards.cc", "compares = has_copies()", "compares = !defect && has_copies()"),
    "buffers stay each rank's own": (
        "strategy/ddp/ddp.cc", "    broadcast_tensors(world_, buffers_);\n    shard_buffers_.begin_step",
        "    if (!defect) broadcast_tensors(world_, buffers_);\n    shard_buffers_.begin_step"),
    "a residual is lost": (
        "step/communication_hook.cc", "if (!residual.defined())", "if (!residual.defined() || defect)"),
    "a residual keeps its old unit": (
        "step/communication_hook.cc", "if (before != bucket.unit)", "if (before != bucket.unit && !defect)"),
    "batch norm counts ranks alike": (
        "model/sync_batch_norm.cc", "    return ranks.loss_weight ?", "    if (defect) return 1;\n    return ranks.loss_weight ?"),
    "a chunk is begun again": (
        "step/update/journal_writer.h", "    if (!journal_) return 0;", "    if (!journal_ || defect) return 0;"),
    "the key comes before the redo copy": (
        "step/update/journal_writer.h", "    return part.slot->begin(part.targets);",
        "    const Targets beside = part.slot->begin(part.targets);\n"
        "    if (defect) part.slot->complete(part.elements, part.mark);\n    return beside;"),
}


def with_defects(source):
    text = (ROOT / source).read_text()
    for name, (where, right, wrong) in DEFECTS.items():
        if where != source:
            continue
        if text.count(right) != 1:
            sys.exit(f"tests/defects.py: {right!r} stands {text.count(right)} times in lockstep/{source}; once is expected. "
                     f'Say there how lockstep/{source} does it now, for the defect "{name}".')
        text = text.replace(right, wrong.replace("defect", f'defect("{name}")'))
    return f'#include "tests/defects.h"\n#line 1 "{ROOT / source}"\n' + text


def main():
    folder, *sources = sys.argv[1:]
    unknown = {where for where, _, _ in DEFECTS.values()} - set(sources)
    if unknown:
        sys.exit(f"tests/defects.py: no copy is asked for of {', '.join(sorted(unknown))}, which has a defect")
    for source in sources:
        made = Path(folder, "lockstep", source)
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(with_defects(source))


if __name__ == "__main__":
    main()
