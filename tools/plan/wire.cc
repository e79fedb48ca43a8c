// SPDX-License-Identifier: Apache-2.0
#include "tools/plan/wire.h"

#include <cmath>

namespace lockstep::plan {
namespace {

constexpr double kGlooHeader = 48;
constexpr double kRecord = 16384, kOfRecord = 5 + 1 + 16;
constexpr double kSegment = 1500 - 20 - 20 - 12, kOfSegment = 14 + 20 + 20 + 12;

double encrypted(double bytes) { return bytes + std::ceil(bytes / kRecord) * kOfRecord; }

double segments(double bytes) { return std::ceil(encrypted(bytes) / kSegment); }

// The packets of one write to the connection.
double written(double bytes) { return encrypted(bytes) + segments(bytes) * kOfSegment; }

}  // namespace

MessageBytes bytes_on_wire(double bytes) {
  return {.there = written(kGlooHeader) + written(bytes),
          .back = written(kGlooHeader) + std::floor(segments(bytes) / 2) * kOfSegment};
}

}  // namespace lockstep::plan
