#include "lockstep/strategy/kvstore/device_sum.h"

#include <array>

#include "lockstep/model/parameters.h"
#include "lockstep/strategy/devices/replica.h"

namespace lockstep {
namespace {

constexpr std::int64_t kWorthDividing = 1 << 16;  // elements: below it, waking the devices costs more
constexpr std::int64_t kRunsPerTask = 4;

template <class T>
void sum_in_place(T* into, std::span<const Term> terms, torch::ScalarType dtype, std::int64_t count,
                  const ParallelFor& parallel_for) {
  const std::int64_t runs = (count + kMaxRun - 1) / kMaxRun;
  const auto part = [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t run = first; run < last; ++run) {
      const std::int64_t begin = run * kMaxRun;
      weighted_sum(terms, dtype, begin, std::min(kMaxRun, count - begin), into + begin);
    }
  };
  parallel_for(0, runs, kRunsPerTask, part);
}

bool all_undefined(const DeviceTensors& values, std::size_t key) { return !values.front()[key].defined(); }

}  // namespace

void weighted_sum_into(const torch::Tensor& into, std::span<const Term> terms, const ParallelFor& parallel_for) {
  const torch::ScalarType dtype = into.scalar_type();
  if (dtype == torch::kFloat32)
    return sum_in_place(into.mutable_data_ptr<float>(), terms, dtype, into.numel(), parallel_for);
  if (dtype == torch::kFloat64)
    return sum_in_place(into.mutable_data_ptr<double>(), terms, dtype, into.numel(), parallel_for);
  const torch::Tensor wide = torch::empty({into.numel()}, torch::kFloat32);
  sum_in_place(wide.mutable_data_ptr<float>(), terms, dtype, into.numel(), parallel_for);
  into.copy_(wide);
}

std::vector<torch::Tensor> dense_views(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> views;
  for (const torch::Tensor& tensor : tensors)
    views.push_back(tensor.defined() ? dense_view(tensor.detach()) : torch::Tensor());
  return views;
}

std::vector<torch::Tensor> DeviceSum::sum(const DeviceTensors& values, std::int64_t first) {
  if (values.size() == 1) return values.front();
  return where_ == SumOn::kCpu ? sum_on_cpu(values, first) : sum_on_device(values);
}

std::vector<torch::Tensor> DeviceSum::sum_on_cpu(const DeviceTensors& values, std::int64_t first) {
  const std::size_t keys = values.front().size();
  if (buffers_.size() < static_cast<std::size_t>(first) + keys) buffers_.resize(static_cast<std::size_t>(first) + keys);
  std::vector<torch::Tensor> sums(keys);
  for (std::size_t key = 0; key < keys; ++key) {
    if (all_undefined(values, key)) continue;
    torch::Tensor& buffer = buffers_[static_cast<std::size_t>(first) + key];
    if (!buffer.defined()) buffer = torch::empty_like(values.front()[key]).detach();
    std::vector<Term> terms;
    for (const auto& device : values) terms.push_back({dense_view(device[key]).const_data_ptr(), 1.0});
    const bool divide = devices_ != nullptr && buffer.numel() > kWorthDividing;
    weighted_sum_into(dense_view(buffer), terms, divide ? ParallelFor(on_all(*devices_)) : on_own_cores);
    sums[key] = buffer;
  }
  return sums;
}

std::vector<torch::Tensor> DeviceSum::sum_on_device(const DeviceTensors& values) {
  devices_->run([values](Device& device) {
    for (const torch::Tensor& value : values[static_cast<std::size_t>(device.index())])
      if (value.defined()) device.reduce(value);
  });
  return values.front();
}

void DeviceSum::on_every_device(std::size_t devices, const std::function<void(std::size_t)>& call) {
  if (devices_ == nullptr || devices == 1)
    for (std::size_t device = 0; device < devices; ++device) call(device);
  else
    devices_->run([call](Device& device) { call(static_cast<std::size_t>(device.index())); });
}

void DeviceSum::copy_to_all(const std::vector<torch::Tensor>& from, const DeviceTensors& to) {
  on_every_device(to.size(), [from, to](std::size_t device) {
    const torch::NoGradGuard no_grad;
    for (std::size_t key = 0; key < from.size(); ++key)
      if (to[device][key].defined() && !to[device][key].is_alias_of(from[key]))
        torch::Tensor(to[device][key]).copy_(from[key]);
  });
}

}  // namespace lockstep
