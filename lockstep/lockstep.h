// lockstep/lockstep.h: the whole public interface. HACKING.md walks through it.
#pragma once

#include "lockstep/base/error.h"                     // IWYU pragma: export
#include "lockstep/checkpoint/checkpoint_folder.h"   // IWYU pragma: export
#include "lockstep/checkpoint/safetensors.h"         // IWYU pragma: export
#include "lockstep/collective/world.h"               // IWYU pragma: export
#include "lockstep/data/dataset.h"                   // IWYU pragma: export
#include "lockstep/data/fashion_mnist.h"             // IWYU pragma: export
#include "lockstep/data/idx.h"                       // IWYU pragma: export
#include "lockstep/data/loader.h"                    // IWYU pragma: export
#include "lockstep/data/sampler.h"                   // IWYU pragma: export
#include "lockstep/gradient/communication_hook.h"     // IWYU pragma: export
#include "lockstep/model/alexnet.h"                  // IWYU pragma: export
#include "lockstep/model/gpt.h"                      // IWYU pragma: export
#include "lockstep/model/inception.h"                // IWYU pragma: export
#include "lockstep/model/layout.h"                   // IWYU pragma: export
#include "lockstep/model/lenet.h"                    // IWYU pragma: export
#include "lockstep/model/mlp.h"                      // IWYU pragma: export
#include "lockstep/model/models.h"                   // IWYU pragma: export
#include "lockstep/model/resnet.h"                   // IWYU pragma: export
#include "lockstep/model/stage.h"                    // IWYU pragma: export
#include "lockstep/model/sync_batch_norm.h"          // IWYU pragma: export
#include "lockstep/model/task.h"                     // IWYU pragma: export
#include "lockstep/optimizer/adam.h"                 // IWYU pragma: export
#include "lockstep/optimizer/gradient_scaler.h"      // IWYU pragma: export
#include "lockstep/optimizer/lamb.h"                 // IWYU pragma: export
#include "lockstep/optimizer/lars.h"                 // IWYU pragma: export
#include "lockstep/optimizer/schedule.h"             // IWYU pragma: export
#include "lockstep/optimizer/sgd.h"                  // IWYU pragma: export
#include "lockstep/strategy/ddp.h"                   // IWYU pragma: export
#include "lockstep/strategy/devices.h"               // IWYU pragma: export
#include "lockstep/strategy/periodic_average.h"      // IWYU pragma: export
#include "lockstep/strategy/replica.h"               // IWYU pragma: export
#include "lockstep/strategy/strategy.h"              // IWYU pragma: export
#include "lockstep/strategy/towers.h"                // IWYU pragma: export
#include "lockstep/strategy/verify.h"                // IWYU pragma: export
#include "lockstep/train/run.h"                      // IWYU pragma: export
