// SPDX-License-Identifier: Apache-2.0
// collective/calls/collective_names.h: the names of the enumerators of lockstep/collective_types.h, each in their order.
//
// Threads: constants
#pragma once

#include "lockstep/base/names.h"
#include "lockstep/collective_types.h"

namespace lockstep {

template <>
inline constexpr auto kNames<DType> = in_order<DType>({"float32", "float64", "float16", "bfloat16", "int8", "uint8",
                                                       "int16", "int32", "int64", "bool"});

template <>
inline constexpr auto kNames<ReduceOp> = in_order<ReduceOp>({"sum", "mean", "product", "min", "max", "bit_and",
                                                             "bit_or", "bit_xor"});

template <>
inline constexpr auto kNames<Algorithm> = in_order<Algorithm>({"direct", "central", "ring", "tree", "fastest"});

template <>
inline constexpr auto kNames<Operation> = in_order<Operation>({"nothing", "barrier", "all_reduce", "reduce",
                                                               "reduce_scatter", "all_gather", "broadcast", "gather",
                                                               "scatter", "all_to_all", "subgroup", "step", "send",
                                                               "receive"});

}  // namespace lockstep
