// SPDX-License-Identifier: Apache-2.0
// strategy/option_names.h: the names of the options' enumerators on the command line, in errors and in metrics. Those
// of the strategies are in strategies() (lockstep/strategy.h), those of the optimizers in lockstep/optimizers.h.
//
// Threads: constants
#pragma once

#include <optional>

#include "lockstep/collective/calls/collective_names.h"
#include "lockstep/schedule.h"
#include "lockstep/strategy.h"

namespace lockstep {

template <>
inline constexpr auto kNames<Precision> = in_order<Precision>({"float32", "bfloat16", "float16"});

template <>
inline constexpr std::array kNames<std::optional<Layout>> = {
    Named{"auto", std::optional<Layout>()}, Named{"contiguous", std::optional(Layout::kContiguous)},
    Named{"channels_last", std::optional(Layout::kChannelsLast)}};

template <>
inline constexpr auto kNames<Compression> = in_order<Compression>({"none", "fp16", "bf16", "powersgd", "2bit", "topk"});

template <>
inline constexpr auto kNames<UpdateOn> = in_order<UpdateOn>({"device", "cpu"});

template <>
inline constexpr auto kNames<AverageIn> = in_order<AverageIn>({"float32", "int8"});

template <>
inline constexpr auto kNames<KVStoreKind> = in_order<KVStoreKind>({"local", "local_update_cpu", "local_allreduce_cpu",
                                                                   "local_allreduce_device", "dist_sync", "dist_async",
                                                                   "dist_bounded"});

template <>
inline constexpr auto kNames<PipelineSchedule> = in_order<PipelineSchedule>({"naive", "gpipe", "1f1b"});

template <>
inline constexpr auto kNames<ScheduleKind> = in_order<ScheduleKind>({"constant", "linear", "cosine", "step"});

template <>
inline constexpr auto kNames<LrScaling> = in_order<LrScaling>({"none", "sqrt", "linear"});

template <>
inline constexpr std::array kNames<std::optional<torch::DeviceType>> = {
    Named{"auto", std::optional<torch::DeviceType>()}, Named{"cpu", std::optional(torch::kCPU)},
    Named{"cuda", std::optional(torch::kCUDA)}};

}  // namespace lockstep
