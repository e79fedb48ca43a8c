// SPDX-License-Identifier: Apache-2.0
// cli/report/metrics.h: reads what `lockstep train --metrics FILE` writes.
//
// Flow:    FILE -> here -> cli/report.cc
// Threads: any
#pragma once

#include <filesystem>

#include "cli/report/json.h"

namespace lockstep::report {

// {"start": …, "run": …,           the events, {} if there are none; "run" may be the "stop" of a run that a signal ended
//  "steps": {"step": […], "samples": […], "seconds": […],      where each point ends, since the start of the run
//            "loss": […], "low": […], "high": […], "rate": […]}   at most 500 points, each the mean of some steps
//  "speed": {"p50_ms": …, "p95_ms": …, "samples_per_second": …},   of the steps after the first three
//  "epochs": {"step": […], "samples": […], "seconds": […], "train_loss": […], …},
//  "partial": [text, …]}            what is missing, and why
//
// A step replaces what the file has of it and of later ones: a resumed run goes back. Lines that are cut off or are no
// events are left out and counted in "partial". Throws DataError: nothing in it is an event, or its format is newer than
// this reader; SystemError: it can't be read.
Json read_metrics(const std::filesystem::path& file);

}  // namespace lockstep::report
