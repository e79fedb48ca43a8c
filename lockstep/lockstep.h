// lockstep/lockstep.h: the whole public interface. HACKING.md walks through it.
#pragma once

#include "lockstep/base/error.h"                     // IWYU pragma: export
#include "lockstep/checkpoint/checkpoint_folder.h"   // IWYU pragma: export
#include "lockstep/checkpoint/safetensors.h"         // IWYU pragma: export
#include "lockstep/collective/world.h"               // IWYU pragma: export
#include "lockstep/data/cifar.h"                     // IWYU pragma: export
#include "lockstep/data/csv.h"                       // IWYU pragma: export
#include "lockstep/data/dataset.h"                   // IWYU pragma: export
#include "lockstep/data/fashion_mnist.h"             // IWYU pragma: export
#include "lockstep/data/idx.h"                       // IWYU pragma: export
#include "lockstep/data/image_dataset.h"             // IWYU pragma: export
#include "lockstep/data/image_folder.h"              // IWYU pragma: export
#include "lockstep/data/image_transforms.h"          // IWYU pragma: export
#include "lockstep/data/loader.h"                    // IWYU pragma: export
#include "lockstep/data/memory_images.h"             // IWYU pragma: export
#include "lockstep/data/npy.h"                       // IWYU pragma: export
#include "lockstep/data/open_dataset.h"              // IWYU pragma: export
#include "lockstep/data/order.h"                     // IWYU pragma: export
#include "lockstep/data/packed_dataset.h"            // IWYU pragma: export
#include "lockstep/data/parse_transforms.h"          // IWYU pragma: export
#include "lockstep/data/sampler.h"                   // IWYU pragma: export
#include "lockstep/data/synthetic.h"                 // IWYU pragma: export
#include "lockstep/data/tensor_dataset.h"            // IWYU pragma: export
#include "lockstep/data/tokens.h"                    // IWYU pragma: export
#include "lockstep/model/layout.h"                   // IWYU pragma: export
#include "lockstep/model/lenet.h"                    // IWYU pragma: export
#include "lockstep/model/task.h"                     // IWYU pragma: export
#include "lockstep/optimizer/adamw.h"                // IWYU pragma: export
#include "lockstep/optimizer/schedule.h"             // IWYU pragma: export
#include "lockstep/optimizer/sgd.h"                  // IWYU pragma: export
#include "lockstep/strategy/ddp.h"                   // IWYU pragma: export
#include "lockstep/strategy/strategy.h"              // IWYU pragma: export
#include "lockstep/train/run.h"                      // IWYU pragma: export
