// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/messages.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "lockstep/base/text.h"
#include "lockstep/strategy/pipeline/tensor_messages.h"

namespace lockstep {
namespace {

constexpr int64_t kMostKeys = int64_t{1} << 24;
constexpr int64_t kMostSamples = int64_t{1} << 40;  // of one push: sums of them stay exact

void check_flag(const Received& sender, const bool& flag, const std::string& name) {
  sender.in(*reinterpret_cast<const uint8_t*>(&flag), 0, 1, name);
}

// A key's slices follow each other without gaps, so the server's rows of it are one table.
void check_rows(const Received& sender, const RequestHeader& request, std::span<const KeySlice> slices) {
  sender.require(!slices.empty() && slices.front().key == slices.back().key, "rows of no key, or of several");
  const int64_t bytes = slices.back().offset + slices.back().bytes() - slices.front().offset;
  sender.in(request.bytes, 1, std::max<int64_t>(bytes, 1), "the bytes of a row");
  sender.require(bytes % request.bytes == 0, concat("rows of ", request.bytes, " bytes in ", bytes));
  sender.bytes(request.count, std::max<int64_t>(request.bytes, sizeof(int64_t)), "rows");
}

}  // namespace

void check(const Received& sender, const RequestHeader& request, const BlockLayout& layout, bool compressed) {
  sender.in(static_cast<int64_t>(request.request), 0, static_cast<int64_t>(Request::kGoodbye), "a request");
  if (request.request >= Request::kDelays) return;  // nothing else in it counts
  if (request.request == Request::kInit) {
    sender.in(request.count, 0, kMostKeys, "the number of keys");
    sender.in(request.bytes, 1, std::numeric_limits<int64_t>::max(), "the elements from which keys are split");
    return;
  }
  const auto last = sender.in(to_int64(request.slices.last), 0, std::ssize(layout.slices()), "the last slice");
  sender.in(to_int64(request.slices.first), 0, last, "the first slice");
  check_flag(sender, request.trained, "a flag");
  check_flag(sender, request.stopping, "a flag");
  sender.in(request.push.samples, 0, kMostSamples, "the number of samples");
  sender.in(request.push.examples, 0, kMostSamples, "the number of examples");
  sender.in(request.devices, 0, kMostSamples, "the number of devices");
  sender.require(!std::isinf(request.push.learning_rate), "a learning rate that is infinite");
  sender.require(request.threshold == 0 || (compressed && request.threshold > 0 && std::isfinite(request.threshold)),
                 concat("a threshold of ", request.threshold));
  if (request.request == Request::kPullRows) check_rows(sender, request, layout.slices_of(request.slices));
}

void check(const Received& sender, const std::vector<Key>& keys) {
  for (const Key& key : keys) {
    sender.require(is_dtype(static_cast<int64_t>(key.dtype)), "a key of unknown dtype");
    check_flag(sender, key.trained, "whether a key is trained");
    sender.bytes(key.elements, to_int64(c10::elementSize(key.dtype)), "a key");
    sender.in(key.rows, 1, std::max<int64_t>(key.elements, 1), "the rows of a key");
    sender.require(key.elements % key.rows == 0, concat(key.rows, " rows in ", key.elements, " elements"));
  }
}

void check(const Received& sender, const UpdateOptions& options) {
  sender.in(to_int64(options.optimizer.index()), 0, to_int64(std::variant_size_v<OptimizerOptions>) - 1,
            "the optimizer");
  if (const auto* sgd = std::get_if<SGDOptions>(&options.optimizer)) check_flag(sender, sgd->nesterov, "nesterov");
  for (const auto& [name, value] : values_of(options.optimizer))
    sender.require(std::isfinite(value), concat(name, " is ", value));
  for (const double number : {options.clipping.max_norm, options.clipping.max_value, options.ema_decay})
    sender.require(number >= 0 && std::isfinite(number), concat("clipping or average of ", number));
}

}  // namespace lockstep
