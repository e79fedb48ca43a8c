// SPDX-License-Identifier: Apache-2.0
#include "lockstep/images.h"

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

Tensor with_channels(const Tensor& images, const std::string& origin) {
  const bool good =
      images.scalar_type() == torch::kUInt8 && (images.dim() == 3 || images.dim() == 4) && images.numel() > 0;
  if (!good)
    throw DataError({.what = concat("images of shape ", images.sizes(), " and type ", images.dtype().name(),
                                    ", not (N, H, W) or (N, C, H, W) of bytes"),
                     .here = origin,
                     .likely = "another dataset, or labels where images belong"});
  return (images.dim() == 3 ? images.unsqueeze(1) : images).contiguous();
}

Tensor checked_labels(const Tensor& labels, int64_t images, int64_t classes, const std::string& origin) {
  if (labels.dim() != 1 || labels.size(0) != images)
    throw DataError({.what = concat(images, " images, but labels of shape ", labels.sizes()),
                     .here = origin,
                     .likely = "files of different datasets or splits in one folder"});
  if (!c10::isIntegralType(labels.scalar_type(), /*includeBool=*/false))
    throw DataError(
        {.what = concat("labels of type ", labels.dtype().name()), .here = origin, .next = "give whole numbers"});
  Tensor whole = labels.to(torch::kInt64).contiguous();
  const auto* values = whole.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < images; ++i)
    if (values[i] < 0 || values[i] >= classes)
      throw DataError({.what = concat("label ", values[i], " of sample ", i, " is not in 0..", classes - 1),
                       .here = concat(origin, ", sample ", i),
                       .likely = "a damaged file, or another dataset"});
  return whole;
}

}  // namespace

MemoryImages::MemoryImages(std::string name, const Tensor& images, const Tensor& labels, int64_t classes,
                           std::string origin)
    : name_(std::move(name)),
      images_(with_channels(images, origin)),
      labels_(checked_labels(labels, images_.size(0), classes, origin)),
      classes_(classes),
      origin_(std::move(origin)),
      shape_{images_.size(1), images_.size(2), images_.size(3)},
      pixels_(images_.const_data_ptr<uint8_t>()),
      label_(labels_.const_data_ptr<int64_t>()) {}

StoredImage MemoryImages::read(int64_t index, Bytes&) const {
  const int64_t bytes = shape_.values();
  return {.bytes = {pixels_ + index * bytes, to_size(bytes)}, .shape = shape_, .label = label_[index]};
}

std::string MemoryImages::origin(int64_t index) const { return concat(origin_, ", sample ", index); }

}  // namespace lockstep
