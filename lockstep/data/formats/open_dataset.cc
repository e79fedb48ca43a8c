#include "lockstep/datasets.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/images.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// "kind:path?key=value&key=value"; options that nobody asked for are an error.
class Request {
 public:
  explicit Request(const DataSource& source) : whole_(source.data), augment_(source.augment) {
    const std::size_t question = whole_.find('?');
    const std::string name = whole_.substr(0, question);
    const std::size_t colon = name.find(':');
    kind_ = name.substr(0, colon);
    path_ = colon == std::string::npos ? source.folder : name.substr(colon + 1);
    if (question == std::string::npos) return;
    for (const std::string& option : split(whole_.substr(question + 1), '&')) {
      const std::size_t equals = option.find('=');
      if (equals == std::string::npos) throw refuse(concat("'", option, "' is no KEY=VALUE"));
      options_[option.substr(0, equals)] = option.substr(equals + 1);
    }
  }

  const std::string& kind() const { return kind_; }
  const std::string& augment() const { return augment_; }
  std::string path_or(const std::string& otherwise) const { return path_.empty() ? otherwise : path_; }
  const std::string& path() const {
    if (path_.empty()) throw refuse("it needs a path");
    return path_;
  }

  std::string text(const std::string& key, const std::string& otherwise) {
    const auto found = options_.find(key);
    if (found == options_.end()) return otherwise;
    const std::string value = found->second;
    options_.erase(found);
    return value;
  }
  double number(const std::string& key, double otherwise) {
    const std::string value = text(key, "");
    if (value.empty()) return otherwise;
    double parsed = 0;
    const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
    if (error != std::errc() || stop != value.data() + value.size())
      throw refuse(concat(key, "=", value, " is no number"));
    return parsed;
  }
  std::int64_t whole(const std::string& key, std::int64_t otherwise) {
    return static_cast<std::int64_t>(number(key, static_cast<double>(otherwise)));
  }

  void require_all_used(bool has_images) const {
    if (!options_.empty()) throw refuse(concat("it has no option ", options_.begin()->first));
    if (!has_images && !augment_.empty())
      throw UsageError({.what = concat("--augment is for images, ", whole_, " has none"), .next = "leave it out"});
  }

  UsageError refuse(const std::string& why) const {
    return UsageError({.what = concat("--data ", whole_, ": ", why), .next = "see docs/data.md"});
  }

 private:
  std::string whole_;
  std::string augment_;
  std::string kind_;
  std::string path_;
  std::map<std::string, std::string> options_;
};

ImageTransforms training(const Request& request, const ImageTransforms& base) {
  return parse_transforms(request.augment(), base);
}
ImageTransforms validating(const Request& request, const ImageTransforms& base) {
  return without_augmentation(training(request, base));
}

ImageTransforms photographs() {  // the usual mean and deviation of ImageNet
  return {.mean = {0.485F, 0.456F, 0.406F}, .deviation = {0.229F, 0.224F, 0.225F}};
}

// The same images for both, cut in two parts.
TrainAndValidation in_two_parts(std::shared_ptr<const Dataset> train, std::shared_ptr<const Dataset> validation,
                                double share, const Request& request) {
  if (share < 0 || share >= 1) throw request.refuse("val= is a share below 1");
  const std::int64_t size = train->size();
  const auto held_out = static_cast<std::int64_t>(static_cast<double>(size) * share);
  if (held_out == 0) return {std::move(train), nullptr};
  return {std::make_shared<SubsetDataset>(std::move(train), 0, size - held_out),
          std::make_shared<SubsetDataset>(std::move(validation), size - held_out, size)};
}

TrainAndValidation images_in_two_parts(const std::shared_ptr<const ImageSource>& source, const ImageTransforms& base,
                                       double share, const Request& request) {
  request.require_all_used(true);
  return in_two_parts(std::make_shared<ImageDataset>(source, training(request, base)),
                      std::make_shared<ImageDataset>(source, validating(request, base)), share, request);
}

template <class D>
TrainAndValidation both_splits(Request& request, const std::string& folder) {
  request.require_all_used(true);
  return {std::make_shared<D>(folder, Split::kTrain, training(request, D::normalised())),
          std::make_shared<D>(folder, Split::kValidation, validating(request, D::normalised()))};
}

TrainAndValidation fashion_mnist(Request& request) {
  return both_splits<FashionMNIST>(request, request.path_or(FashionMNIST::kDebianFolder));
}

TrainAndValidation mnist(Request& request) {
  request.require_all_used(true);
  const ImageTransforms base{.mean = {0.1307F}, .deviation = {0.3081F}};
  const auto source = [&](Split split) { return read_mnist_files("mnist", request.path(), split, 10); };
  return {std::make_shared<ImageDataset>(source(Split::kTrain), training(request, base)),
          std::make_shared<ImageDataset>(source(Split::kValidation), validating(request, base))};
}

TrainAndValidation image_folder(Request& request) {
  request.require_all_used(true);
  const fs::path folder = request.path();
  if (!fs::is_directory(folder / "train"))
    return {std::make_shared<ImageDataset>(std::make_shared<ImageFolder>(folder), training(request, photographs())),
            nullptr};
  const auto train = std::make_shared<ImageFolder>(folder / "train");
  TrainAndValidation both{std::make_shared<ImageDataset>(train, training(request, photographs())), nullptr};
  if (fs::is_directory(folder / "val"))
    both.validation = std::make_shared<ImageDataset>(
        std::make_shared<ImageFolder>(folder / "val", train->class_names()), validating(request, photographs()));
  return both;
}

std::shared_ptr<const Dataset> packed_part(const fs::path& folder, const Request& request, bool validation,
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

TrainAndValidation packed_records(Request& request) {
  const fs::path folder = request.path();
  const std::int64_t window = request.whole("window", kPackedWindow);
  if (!fs::is_directory(folder / "train")) return {packed_part(folder, request, false, window), nullptr};
  TrainAndValidation both{packed_part(folder / "train", request, false, window), nullptr};
  if (fs::is_directory(folder / "val")) both.validation = packed_part(folder / "val", request, true, window);
  return both;
}

// Bytes of images become images, everything else rows.
TrainAndValidation arrays(Request& request, const torch::Tensor& data, const torch::Tensor& target) {
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

TrainAndValidation npy(Request& request) {
  const auto paths = split(request.path(), ',');
  if (paths.size() != 2) throw request.refuse("it is npy:DATA.npy,TARGETS.npy");
  return arrays(request, read_npy(paths[0]), read_npy(paths[1]));
}

TrainAndValidation npz(Request& request) {
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

TrainAndValidation csv(Request& request) {
  const std::string delimiter = request.text("delimiter", ",");
  if (delimiter.size() != 1) throw request.refuse("the delimiter is one character");
  const auto table = csv_dataset(
      request.path(),
      {.target = request.text("target", ""), .classes = request.whole("classes", 1) != 0, .delimiter = delimiter[0]});
  const double share = request.number("val", 0);
  request.require_all_used(false);
  return in_two_parts(table, table, share, request);
}

TrainAndValidation text(Request& request) {
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

TrainAndValidation synthetic(Request& request) {
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

struct Kind {
  const char* name;
  TrainAndValidation (*open)(Request& request);
};
constexpr Kind kKinds[] = {
    {"fashion-mnist", fashion_mnist},
    {"mnist", mnist},
    {"cifar-10", [](Request& request) { return both_splits<CIFAR10>(request, request.path()); }},
    {"cifar-100", [](Request& request) { return both_splits<CIFAR100>(request, request.path()); }},
    {"imagefolder", image_folder},
    {"packed", packed_records},
    {"npy", npy},
    {"npz", npz},
    {"csv", csv},
    {"text", text},
    {"synthetic", synthetic}};

}  // namespace

std::vector<std::string> dataset_kinds() {
  std::vector<std::string> names;
  for (const Kind& kind : kKinds) names.emplace_back(kind.name);
  return names;
}

TrainAndValidation open_dataset(const DataSource& source) {
  Request request(source);
  for (const Kind& kind : kKinds)
    if (request.kind() == kind.name) return kind.open(request);
  throw UsageError({.what = concat("no such value for --data: ", request.kind()),
                    .next = concat("one of: ", join(dataset_kinds(), ", "))});
}

}  // namespace lockstep
