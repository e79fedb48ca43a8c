// SPDX-License-Identifier: Apache-2.0
#include "lockstep/plan/measure_compression.h"

#include <algorithm>

#include "lockstep/base/median.h"
#include "lockstep/communication_hook.h"
#include "lockstep/deadline.h"
#include "lockstep/gradient/bucket.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/option_names.h"

namespace lockstep::plan {
namespace {

constexpr std::size_t kBucket = std::size_t{4} << 20;  // bytes, unless a single parameter is larger
constexpr int kTimed = 5;
constexpr std::int64_t kPowerRank = 4;  // the default of --compression powersgd
constexpr double kTopShare = 0.01;      // of --compression topk

// Bytes that PowerSGD sends of a gradient, as lockstep/gradient/communication_hook.cc decides it.
double power_sgd_bytes(const torch::Tensor& parameter) {
  const double all = static_cast<double>(parameter.nbytes());
  if (parameter.dim() < 2 || parameter.numel() == 0) return all;
  const std::int64_t n = parameter.size(0), m = parameter.numel() / n;
  const std::int64_t rank = std::min({kPowerRank, n, m});
  return (n + m) * rank < n * m ? static_cast<double>((n + m) * rank * parameter.element_size()) : all;
}

double sent_share(Compression kind, const std::vector<NamedTensor>& parameters) {
  switch (kind) {
    case Compression::kNone: return 1;
    case Compression::kFloat16:
    case Compression::kBFloat16: return 0.5;
    case Compression::kTwoBit: return 1.0 / 16;
    case Compression::kTopK: return 2 * kTopShare;  // a place of four bytes for each value
    case Compression::kPowerSGD: break;
  }
  double sent = 0, all = 0;
  for (const auto& [name, parameter] : parameters) {
    sent += power_sgd_bytes(parameter);
    all += static_cast<double>(parameter.nbytes());
  }
  return all > 0 ? sent / all : 1;
}

CompressionTimes times_of(Compression kind, Bucket& bucket) {
  const World alone = World::single();
  const auto hook = make_hook({.kind = kind});
  const torch::Tensor gradient = torch::randn_like(bucket.values);
  std::vector<double> encode, decode;
  for (int i = 0; i <= kTimed; ++i) {
    bucket.values.copy_(gradient);
    const Stopwatch watch;
    const auto finish = hook->start(alone, {.flat = bucket.values, .parts = bucket.parts()});
    const double encoded = watch.seconds();
    finish();
    if (i == 0) continue;  // it makes room
    encode.push_back(encoded);
    decode.push_back(watch.seconds() - encoded);
  }
  const double bytes = static_cast<double>(bucket.values.nbytes());
  return {.kind = name_of(kind), .encode = median(encode) / bytes, .decode = median(decode) / bytes};
}

}  // namespace

std::vector<CompressionTimes> measure_compression(const torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  const auto parameters = named_parameters(model);
  auto buckets = make_buckets(World::single(), parameters, kBucket);
  if (buckets.empty()) return {};
  Bucket& largest = *std::ranges::max_element(buckets, {}, [](const Bucket& each) { return each.values.numel(); });
  std::vector<CompressionTimes> all;
  for (const auto& [name, kind] : kNames<Compression>) {
    if (kind == Compression::kNone) continue;
    all.push_back(times_of(kind, largest));
    all.back().sent = sent_share(kind, parameters);
  }
  return all;
}

}  // namespace lockstep::plan
