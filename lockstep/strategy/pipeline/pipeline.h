// strategy/pipeline/pipeline.h: `pipeline`: consecutive pieces of the model on different devices. S1's model parallelism.
//
//   stage 0        stage 1              stage p-1
//   pieces 0-3 --> pieces 4-6 --> ... --> pieces .. and the loss     activations forward
//              <--            <-- ... <--                            gradients back
//
// A batch is cut into m micro-batches, so that stages work at the same time (strategy/pipeline/pipeline_schedule.h). Their
// losses are weighted by samples: the gradient is that of the whole batch. Stages x replicas is the number of devices:
// with more devices than stages, each stage has d of them, the batch is cut into d parts, and the gradients of a stage
// are summed over its d devices (data parallel, p x d).
//
// What passes from stage to stage are tensors as the pieces return them: several where a skip connection crosses the
// cut. The update is shared out over all devices. A piece must not change its input in place. Batch normalisation
// sees a micro-batch at a time.
//
// Stages are threads of one process, or, in a world of several ranks, processes (strategy/pipeline/pipeline_processes.h).
//
// Owns:    the devices' threads, a replica of the model per d
// Threads: one scheduling thread; device i has stage i % p of replica i / p
// Ranks:   one; see pipeline_processes.h for more
#pragma once

#include <memory>

#include "lockstep/strategy.h"

namespace lockstep {

std::unique_ptr<Strategy> make_pipeline(const World& world, const Task& task, const StrategyOptions& options);

}  // namespace lockstep
