// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/device_sum.h"

#include "lockstep/model/parameters.h"

namespace lockstep {
namespace {

constexpr std::int64_t kWorthDividing = 1 << 16;  // elements: below it, waking the devices costs more
constexpr std::int64_t kRunsPerTask = 4;

// In runs of kMaxRun elements, which stay in the first-level cache while all terms are added to them. Each run is
// written by one thread and its order of summation is fixed, so the bits do not depend on the number of threads.
template <class T>
void sum_runs(T* into, std::span<const Term> terms, torch::ScalarType dtype, std::int64_t count,
              const ParallelFor& parallel_for) {
  const std::int64_t runs = (count + kMaxRun - 1) / kMaxRun;
  parallel_for(0, runs, kRunsPerTask, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t begin = first * kMaxRun; begin < std::min(last * kMaxRun, count); begin += kMaxRun)
      weighted_sum(terms, dtype, begin, std::min(kMaxRun, count - begin), into + begin);
  });
}

}  // namespace

void weighted_sum_into(const torch::Tensor& into, std::span<const Term> terms, const ParallelFor& parallel_for) {
  const torch::ScalarType dtype = into.scalar_type();
  const auto run = [&](auto* sum) { sum_runs(sum, terms, dtype, into.numel(), parallel_for); };
  if (dtype == torch::kFloat32) return run(into.mutable_data_ptr<float>());
  if (dtype == torch::kFloat64) return run(into.mutable_data_ptr<double>());
  const torch::Tensor wide = torch::empty({into.numel()}, torch::kFloat32);
  run(wide.mutable_data_ptr<float>());
  into.copy_(wide);
}

std::vector<torch::Tensor> DeviceSum::sum(const DeviceTensors& values, std::size_t first_key) {
  if (values.size() == 1) return values.front();
  if (where_ == SumOn::kCpu) return sum_on_cpu(values, first_key);
  devices_->run([values](Device& device) {
    for (const torch::Tensor& value : values[device.index()])
      if (value.defined()) device.reduce(value);
  });
  return values.front();
}

std::vector<torch::Tensor> DeviceSum::sum_on_cpu(const DeviceTensors& values, std::size_t first_key) {
  const std::size_t keys = values.front().size();
  buffers_.resize(std::max(buffers_.size(), first_key + keys));
  std::vector<torch::Tensor> sums(keys);
  for (std::size_t key = 0; key < keys; ++key) {
    if (!values.front()[key].defined()) continue;
    torch::Tensor& buffer = buffers_[first_key + key];
    if (!buffer.defined()) buffer = torch::empty_like(values.front()[key]).detach();
    std::vector<Term> terms;
    for (const auto& device : values) terms.push_back({dense_view(device[key]).const_data_ptr(), 1.0});
    const bool divide = devices_ != nullptr && buffer.numel() > kWorthDividing;
    weighted_sum_into(dense_view(buffer), terms, divide ? ParallelFor(on_all(*devices_)) : on_own_cores);
    sums[key] = buffer;
  }
  return sums;
}

}  // namespace lockstep
