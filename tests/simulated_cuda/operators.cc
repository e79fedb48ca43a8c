// SPDX-License-Identifier: Apache-2.0
#include "tests/simulated_cuda/operators.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "tests/simulated_cuda/memory.h"
#include "tests/simulated_cuda/simulator.h"

namespace simulated_cuda {
namespace {

// Bytes of its storage from the first element to the last.
size_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return static_cast<size_t>(last + 1) * tensor.element_size();
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  const auto options = at::TensorOptions(at::kCPU).dtype(tensor.dtype());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* const real = real_address(tensor.storage().data());
  return at::for_blob(real, tensor.sizes())
      .strides(tensor.strides())
      .storage_offset(tensor.storage_offset())
      .options(options)
      .make_tensor();
}

void note_touch(const std::string& work, Moment moment, const c10::Stream& stream, const Touch& touch) {
  if (!touch.tensor.defined() || touch.tensor.numel() == 0) return;
  const Lock lock(mutex());
  const auto place = place_of(touch.tensor.const_data_ptr());
  if (!place) return;
  report_race(note(place->block->uses,
                   {work, moment, place->offset, place->offset + extent(touch.tensor), touch.writes}, stream));
}

Moment put(const std::string& work, const c10::Stream& stream, const std::vector<Touch>& touched) {
  const Lock lock(mutex());
  const Moment moment = launch(stream);
  for (const Touch& touch : touched) note_touch(work, moment, stream, touch);
  return moment;
}

}  // namespace simulated_cuda
