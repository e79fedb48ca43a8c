// SPDX-License-Identifier: Apache-2.0
#include <filesystem>

#include "lockstep/base/names.h"
#include "lockstep/data/formats/dataset_request.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/data/packed/packed_records.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

ImageTransforms training(const DatasetRequest& request, const ImageTransforms& base) {
  return parse_transforms(request.augment(), base);
}
ImageTransforms validating(const DatasetRequest& request, const ImageTransforms& base) {
  return without_augmentation(training(request, base));
}

ImageTransforms photographs() {  // the usual mean and deviation of ImageNet
  return {.mean = {0.485F, 0.456F, 0.406F}, .deviation = {0.229F, 0.224F, 0.225F}};
}

// The same images for both, cut in two parts.
Datasets in_two_parts(std::shared_ptr<const Dataset> train, std::shared_ptr<const Dataset> validation, double share,
                      const DatasetRequest& request) {
  if (share < 0 || share >= 1) throw request.refuse("val= is a share below 1");
  const std::int64_t size = train->size();
  const auto held_out = static_cast<std::int64_t>(static_cast<double>(size) * share);
  if (held_out == 0) return {std::move(train), nullptr};
  return {std::make_shared<SubsetDataset>(std::move(train), 0, size - held_out),
          std::make_shared<SubsetDataset>(std::move(validation), size - held_out, size)};
}

Datasets images_in_two_parts(const std::shared_ptr<const ImageSource>& source, const ImageTransforms& base,
                             double share, const DatasetRequest& request) {
  request.require_all_used(true);
  return in_two_parts(std::make_shared<ImageDataset>(source, training(request, base)),
                      std::make_shared<ImageDataset>(source, validating(request, base)), share, request);
}

template <class D>
Datasets both_splits(DatasetRequest& request, const std::string& folder) {
  request.require_all_used(true);
  return {std::make_shared<D>(folder, Split::kTrain, training(request, D::normalised())),
          std::make_shared<D>(folder, Split::kValidation, validating(request, D::normalised()))};
}

Datasets fashion_mnist(DatasetRequest& request) {
  return both_splits<FashionMNIST>(request, request.path_or(FashionMNIST::kDebianFolder));
}

Datasets mnist(DatasetRequest& request) {
  request.require_all_used(true);
  const ImageTransforms base{.mean = {0.1307F}, .deviation = {0.3081F}};
  const auto source = [&](Split split) { return read_mnist_files("mnist", request.path(), split, 10); };
  return {std::make_shared<ImageDataset>(source(Split::kTrain), training(request, base)),
          std::make_shared<ImageDataset>(source(Split::kValidation), validating(request, base))};
}

Datasets image_folder(DatasetRequest& request) {
  request.require_all_used(true);
  const fs::path folder = request.path();
  if (!fs::is_directory(folder / "train"))
    return {std::make_shared<ImageDataset>(std::make_shared<ImageFolder>(folder), training(request, photographs())),
            nullptr};
  const auto train = std::make_shared<ImageFolder>(folder / "train");
  Datasets both{std::make_shared<ImageDataset>(train, training(request, photographs())), nullptr};
  if (fs::is_directory(folder / "val"))
    both.validation = std::make_shared<ImageDataset>(
        std::make_shared<ImageFolder>(folder / "val", train->class_names()), validating(request, photographs()));
  return both;
}

std::shared_ptr<const Dataset> packed_part(const fs::path& folder, const DatasetRequest& request, bool validation,
                                           std::int64_t window) {
  const RecordReader records(folder);
  const bool images = holds_images(records);
  request.require_all_used(images);
  if (!images) return open_packed(folder, {}, window);
  const Record first = first_good_record(records);
  const bool colour = first.encoded || first.shape[0] == 3;
  const ImageTransforms base = colour ? photographs() : ImageTransforms{.mean = {0.5F}, .deviation = {0.5F}};
  return open_packed(folder, validation ? validating(request, base) : training(request, base), window);
}

Datasets packed_records(DatasetRequest& request) {
  const fs::path folder = request.path();
  const std::int64_t window = request.whole("window", kPackedWindow);
  if (!fs::is_directory(folder / "train")) return {packed_part(folder, request, false, window), nullptr};
  Datasets both{packed_part(folder / "train", request, false, window), nullptr};
  if (fs::is_directory(folder / "val")) both.validation = packed_part(folder / "val", request, true, window);
  return both;
}

// Bytes of images become images, everything else rows.
Datasets arrays(DatasetRequest& request, const torch::Tensor& data, const torch::Tensor& target) {
  const double share = request.number("val", 0);
  const std::string name = fs::path(split(request.path(), ',')[0]).filename();
  const bool images = data.scalar_type() == torch::kUInt8 && data.dim() >= 3 && !target.is_floating_point();
  const std::int64_t found = images && target.numel() > 0 ? target.max().item<std::int64_t>() + 1 : 1;
  const std::int64_t classes = request.whole("classes", found);
  if (images)
    return images_in_two_parts(std::make_shared<MemoryImages>(name, data, target, classes, request.path()), {}, share,
                               request);
  request.require_all_used(false);
  const auto rows = std::make_shared<TensorDataset>(name, data, target);
  return in_two_parts(rows, rows, share, request);
}

Datasets npy(DatasetRequest& request) {
  const auto paths = split(request.path(), ',');
  if (paths.size() != 2) throw request.refuse("it is npy:DATA.npy,TARGETS.npy");
  return arrays(request, read_npy(paths[0]), read_npy(paths[1]));
}

Datasets npz(DatasetRequest& request) {
  const auto found = read_npz(request.path());
  const auto array = [&](const std::string& name) {
    const auto entry = found.find(name);
    if (entry != found.end()) return entry->second;
    std::vector<std::string> names;
    for (const auto& [known, tensor] : found) names.push_back(known);
    throw request.refuse(concat("it has no array ", name, ", only ", join(names, ", ")));
  };
  const torch::Tensor data = array(request.text("data", "x"));
  return arrays(request, data, array(request.text("target", "y")));
}

Datasets csv(DatasetRequest& request) {
  const std::string delimiter = request.text("delimiter", ",");
  if (delimiter.size() != 1) throw request.refuse("the delimiter is one character");
  const auto table = csv_dataset(
      request.path(),
      {.target = request.text("target", ""), .classes = request.whole("classes", 1) != 0, .delimiter = delimiter[0]});
  const double share = request.number("val", 0);
  request.require_all_used(false);
  return in_two_parts(table, table, share, request);
}

Datasets text(DatasetRequest& request) {
  TokenOptions options{.block = request.whole("block", 128),
                       .token_bytes = static_cast<int>(request.whole("bits", 8) / 8),
                       .vocabulary = request.whole("vocabulary", 0)};
  const double share = request.number("val", 0);
  request.require_all_used(false);
  options.leave = share;
  auto train = std::make_shared<TokenDataset>(request.path(), options);
  if (share == 0) return {train, nullptr};
  options.skip = 1 - share;
  options.leave = 0;
  return {train, std::make_shared<TokenDataset>(request.path(), options)};
}

Datasets synthetic(DatasetRequest& request) {
  std::vector<std::int64_t> sizes;
  for (const std::string& size : split(request.path_or("1024x3x32x32"), 'x')) {
    int value = 0;
    if (!parse_int(size, value)) throw request.refuse("it is synthetic:NxCxHxW");
    sizes.push_back(value);
  }
  if (sizes.size() != 4) throw request.refuse("it is synthetic:NxCxHxW");
  const auto source = synthetic_images(
      {.samples = sizes[0], .shape = {sizes[1], sizes[2], sizes[3]}, .classes = request.whole("classes", 10)});
  const double share = request.number("val", 0);
  return images_in_two_parts(source, {.mean = {0.5F}, .deviation = {0.2F}}, share, request);
}

// Every kind of dataset that --data knows. To add one, write a function that opens it and add a row; the command's help
// and the error for an unknown kind list the names from here, and docs/data.md describes them.
struct Kind {
  const char* name;
  Datasets (*open)(DatasetRequest& request);
};
constexpr Kind kKinds[] = {
    {"fashion-mnist", fashion_mnist},
    {"mnist", mnist},
    {"cifar-10", [](DatasetRequest& request) { return both_splits<CIFAR10>(request, request.path()); }},
    {"cifar-100", [](DatasetRequest& request) { return both_splits<CIFAR100>(request, request.path()); }},
    {"imagefolder", image_folder},
    {"packed", packed_records},
    {"npy", npy},
    {"npz", npz},
    {"csv", csv},
    {"text", text},
    {"synthetic", synthetic}};

}  // namespace

std::vector<std::string> dataset_kinds() { return names_in(kKinds); }

Datasets open_dataset(const DataSource& source) {
  DatasetRequest request(source);
  for (const Kind& kind : kKinds)
    if (request.kind() == kind.name) return kind.open(request);
  throw UsageError({.what = concat("no such value for --data: ", request.kind()),
                    .next = concat("one of: ", join(dataset_kinds(), ", "))});
}

}  // namespace lockstep
