// SPDX-License-Identifier: Apache-2.0
// lockstep/lockstep.h: the whole public interface, in reading order. HACKING.md walks through it.
#pragma once

// clang-format off
// IWYU pragma: begin_exports

// A whole program, with every option of `lockstep train`:
#include "lockstep/run.h"                 // main(): command line, ranks, training, exit code
#include "lockstep/task.h"                // what to train: a model, its forward, its loss
#include "lockstep/models.h"              // lockstep's own models as tasks
#include "lockstep/evaluate.h"            // loss and accuracy of a model over a dataset
#include "lockstep/verify.h"              // does the task train the same on one rank and on several?

// A training loop of your own:
#include "lockstep/world.h"               // the ranks of a job and their collectives
#include "lockstep/spawn.h"               // ranks without a launcher: processes, or an address
#include "lockstep/ddp.h"                 // DistributedDataParallel
#include "lockstep/optimizers.h"          // SGD, Adam, AdamW …; clipping, moving averages
#include "lockstep/schedule.h"            // learning rates
#include "lockstep/communication_hook.h"  // compressed gradients
#include "lockstep/sync_batch_norm.h"     // batch norm over all ranks
#include "lockstep/gradient_scaler.h"     // loss scaling for float16
#include "lockstep/timeline.h"            // a file with what every rank did when
#include "lockstep/periodic_average.h"    // local SGD in a loop of your own
#include "lockstep/layout.h"              // channels last or not
#include "lockstep/activation_checkpoint.h"  // less memory for activations, which are computed twice

// Data:
#include "lockstep/loader.h"              // batches of this rank, loaded ahead
#include "lockstep/sampler.h"             // which samples, in which order
#include "lockstep/dataset.h"             // samples by number: the interface
#include "lockstep/datasets.h"            // the formats there are
#include "lockstep/images.h"              // transforms of images

// Checkpoints:
#include "lockstep/checkpoint.h"          // safetensors files
#include "lockstep/checkpoints.h"         // a folder of the newest, written in the background
#include "lockstep/recovery.h"            // a program that goes on when a rank is lost
#include "lockstep/loop_recovery.h"       // what it keeps of a training loop

// Devices of one process, and strategies by name:
#include "lockstep/devices.h"             // a thread for each device, and their collectives
#include "lockstep/device_place.h"        // where a device is: a GPU, or cores
#include "lockstep/towers.h"              // data parallel training in four steps
#include "lockstep/data_parallel.h"       // a module on several devices that is called like one
#include "lockstep/average_nets.h"        // the average of networks that devices train
#include "lockstep/kvstore.h"             // push and pull: a store of weights, here or on servers
#include "lockstep/strategy.h"            // all of these behind one interface: what the training loop uses

// Parts of the others:
#include "lockstep/error.h"               // what is thrown: what happened, where, the likely cause, what to do next
#include "lockstep/stop.h"                // whether a signal has asked the job to stop
#include "lockstep/stop_all.h"            // ends all work of this process, from anywhere
#include "lockstep/memory.h"              // keeps freed memory, for speed
#include "lockstep/deadline.h"            // deadlines and stopwatches
#include "lockstep/cores.h"               // the cores that this process may use

// IWYU pragma: end_exports
// clang-format on
