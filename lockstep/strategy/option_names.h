// SPDX-License-Identifier: Apache-2.0
// strategy/option_names.h: the names of the options' enumerators on the command line, in errors and in metrics. Those
// of the strategies are in strategies() (lockstep/strategy.h), those of the optimizers in lockstep/optimizers.h.
//
// Threads: constants
#pragma once

#include <array>
#include <optional>

#include "lockstep/base/names.h"
#include "lockstep/schedule.h"
#include "lockstep/strategy.h"

namespace lockstep {

template <>
inline constexpr std::array kNames<Precision> = {Named{"float32", Precision::kFloat32},
                                                 Named{"bfloat16", Precision::kBFloat16},
                                                 Named{"float16", Precision::kFloat16}};

template <>
inline constexpr std::array kNames<std::optional<Layout>> = {
    Named{"auto", std::optional<Layout>()}, Named{"contiguous", std::optional(Layout::kContiguous)},
    Named{"channels_last", std::optional(Layout::kChannelsLast)}};

template <>
inline constexpr std::array kNames<Algorithm> = {Named{"direct", Algorithm::kDirect},
                                                 Named{"central", Algorithm::kCentral}, Named{"ring", Algorithm::kRing},
                                                 Named{"tree", Algorithm::kTree}};

template <>
inline constexpr std::array kNames<Compression> = {
    Named{"none", Compression::kNone},     Named{"fp16", Compression::kFloat16},
    Named{"bf16", Compression::kBFloat16}, Named{"powersgd", Compression::kPowerSGD},
    Named{"2bit", Compression::kTwoBit},   Named{"topk", Compression::kTopK}};

template <>
inline constexpr std::array kNames<UpdateOn> = {Named{"device", UpdateOn::kDevice}, Named{"cpu", UpdateOn::kCpu}};

template <>
inline constexpr std::array kNames<KVStoreKind> = {Named{"local", KVStoreKind::kLocal},
                                                   Named{"local_update_cpu", KVStoreKind::kLocalUpdateCpu},
                                                   Named{"local_allreduce_cpu", KVStoreKind::kLocalAllReduceCpu},
                                                   Named{"local_allreduce_device", KVStoreKind::kLocalAllReduceDevice},
                                                   Named{"dist_sync", KVStoreKind::kDistSync},
                                                   Named{"dist_async", KVStoreKind::kDistAsync},
                                                   Named{"dist_bounded", KVStoreKind::kDistBounded}};

template <>
inline constexpr std::array kNames<PipelineSchedule> = {Named{"naive", PipelineSchedule::kNaive},
                                                        Named{"gpipe", PipelineSchedule::kGPipe},
                                                        Named{"1f1b", PipelineSchedule::k1F1B}};

template <>
inline constexpr std::array kNames<ScheduleKind> = {
    Named{"constant", ScheduleKind::kConstant}, Named{"linear", ScheduleKind::kLinear},
    Named{"cosine", ScheduleKind::kCosine}, Named{"step", ScheduleKind::kStep}};

template <>
inline constexpr std::array kNames<LrScaling> = {Named{"none", LrScaling::kNone}, Named{"sqrt", LrScaling::kSqrt},
                                                 Named{"linear", LrScaling::kLinear}};

template <>
inline constexpr std::array kNames<std::optional<torch::DeviceType>> = {
    Named{"auto", std::optional<torch::DeviceType>()}, Named{"cpu", std::optional(torch::kCPU)},
    Named{"cuda", std::optional(torch::kCUDA)}};

}  // namespace lockstep
