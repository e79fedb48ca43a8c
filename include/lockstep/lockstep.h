// lockstep/lockstep.h: the whole public interface. HACKING.md walks through it.
#pragma once

#include "lockstep/checkpoint.h"          // IWYU pragma: export
#include "lockstep/communication_hook.h"  // IWYU pragma: export
#include "lockstep/dataset.h"             // IWYU pragma: export
#include "lockstep/datasets.h"            // IWYU pragma: export
#include "lockstep/ddp.h"                 // IWYU pragma: export
#include "lockstep/devices.h"             // IWYU pragma: export
#include "lockstep/error.h"               // IWYU pragma: export
#include "lockstep/gradient_scaler.h"     // IWYU pragma: export
#include "lockstep/images.h"              // IWYU pragma: export
#include "lockstep/kvstore.h"             // IWYU pragma: export
#include "lockstep/layout.h"              // IWYU pragma: export
#include "lockstep/loader.h"              // IWYU pragma: export
#include "lockstep/memory.h"              // IWYU pragma: export
#include "lockstep/models.h"              // IWYU pragma: export
#include "lockstep/optimizers.h"          // IWYU pragma: export
#include "lockstep/periodic_average.h"    // IWYU pragma: export
#include "lockstep/run.h"                 // IWYU pragma: export
#include "lockstep/sampler.h"             // IWYU pragma: export
#include "lockstep/schedule.h"            // IWYU pragma: export
#include "lockstep/strategy.h"            // IWYU pragma: export
#include "lockstep/sync_batch_norm.h"     // IWYU pragma: export
#include "lockstep/task.h"                // IWYU pragma: export
#include "lockstep/towers.h"              // IWYU pragma: export
#include "lockstep/verify.h"              // IWYU pragma: export
#include "lockstep/world.h"               // IWYU pragma: export
