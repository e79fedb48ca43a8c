// SPDX-License-Identifier: Apache-2.0
// bench/benchmarks.h: the benchmarks of `lockstep bench`. Each gets argv from its own name on, prints its table on
// stdout and returns the exit code; lockstep::Error is main's to print (cli/bench.cc).
#pragma once

namespace lockstep::bench {

int bench_collectives(int argc, const char* const* argv);
int bench_step(int argc, const char* const* argv);
int bench_data(int argc, const char* const* argv);
int bench_hosts(int argc, const char* const* argv);
int bench_strategies(int argc, const char* const* argv);

}  // namespace lockstep::bench
