// strategy/pipeline/pipeline_processes.h: a pipeline whose stages are ranks of a World: processes, on one machine or several.
// S1.
//
// Rank r has stage r % p of replica r / p. Activations and gradients travel as messages; the gradients of a stage are
// summed over its replicas, those of a parameter that several stages use over all that use it.
//
// Every rank has the whole model, but activations, gradients and updates only of its stage. synchronise() gives every
// rank the current parameters of all stages, so that validation is shared by all ranks, and rank 0 the optimizer's
// state, so that it can save both.
//
// Flow:    the parts of a batch that data_world() says -> here -> strategy/pipeline/pipeline_stage.h -> World
// Owns:    a model and an optimizer
// Threads: one
// Ranks:   every rank makes the same calls. Per micro-batch a rank sends its activations forward and their gradients
//          back; per step 2(d-1)/d * K of its stage's parameters over d replicas; synchronise(): K
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

// Throws UsageError: several devices in a rank, stages that do not divide the ranks, clipping by norm (no rank has the
// norm of all gradients); MismatchError: models that differ.
std::unique_ptr<Strategy> make_pipeline_of_processes(const World& world, const Task& task,
                                                     const StrategyOptions& options);

}  // namespace lockstep
