// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "lockstep/base/to_size.h"
#include "lockstep/data/images/encoded_image.h"
#include "lockstep/datasets.h"
#include "lockstep/images.h"
#include "lockstep/loader.h"
#include "tests/data/files.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::encode_jpeg;
using testing::encode_png;
using testing::message_of;
using testing::smooth_pixels;
using testing::TempFolder;
using testing::write_bytes;
using testing::write_image_folder;

Placement whole(int64_t height, int64_t width) {
  return {.box = {0, 0, static_cast<double>(width), static_cast<double>(height)}, .height = height, .width = width};
}

torch::Tensor pixels_of(const ImageView& view) {
  return torch::from_blob(const_cast<uint8_t*>(view.pixels), {view.shape.height, view.shape.width, 3},
                          {view.row_stride, 3, 1}, torch::kUInt8)
      .to(torch::kFloat32);
}

double mean_difference(const torch::Tensor& a, const torch::Tensor& b) { return (a - b).abs().mean().item<double>(); }

TEST(Jpeg, decodes_what_was_encoded) {
  const auto pixels = smooth_pixels(61, 83, 1);
  const auto file = encode_jpeg(pixels, 61, 83, 95);
  EXPECT_EQ(encoded_shape(file, ""), (ImageShape{3, 61, 83}));
  Placement placement = whole(61, 83);
  DecodeScratch scratch;
  const ImageView view = decode_image(file, placement, scratch);
  const auto original = torch::tensor(at::ArrayRef<uint8_t>(pixels), torch::kUInt8).reshape({61, 83, 3});
  EXPECT_LT(mean_difference(pixels_of(view), original.to(torch::kFloat32)), 4);
}

// A grey progressive JPEG of 8 x 8 pixels: the mean of each of three colours, then up to 378 scans of one coefficient each,
// which is 0. The only Huffman code is one bit long: 0, for "nothing in this block".
std::vector<uint8_t> jpeg_with_scans(int scans) {
  std::vector<uint8_t> file{0xFF, 0xD8};
  const auto segment = [&file](uint8_t marker, const std::vector<uint8_t>& content) {
    file.insert(file.end(), {0xFF, marker, 0, static_cast<uint8_t>(content.size() + 2)});
    file.insert(file.end(), content.begin(), content.end());
  };
  std::vector<uint8_t> quantisation(65, 1), code(18, 0);
  quantisation[0] = 0;
  segment(0xDB, quantisation);
  segment(0xC2, {8, 0, 8, 0, 8, 3, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0});
  code[1] = 1;
  for (const uint8_t table : {0x00, 0x10}) {
    code[0] = table;
    segment(0xC4, code);
  }
  for (int scan = 0; scan < scans; ++scan) {
    const int ac = scan - 3;  // the coefficients without their last bit, then that bit
    const auto colour = static_cast<uint8_t>(1 + scan % 3);
    const auto coefficient = static_cast<uint8_t>(ac < 0 ? 0 : 1 + ac % 189 / 3);
    const uint8_t bits = ac < 0 ? 0x00 : ac < 189 ? 0x01 : 0x10;
    segment(0xDA, {1, colour, 0, coefficient, coefficient, bits});
    file.push_back(0x7F);
  }
  file.insert(file.end(), {0xFF, 0xD9});
  return file;
}

TEST(Jpeg, refuses_a_file_of_more_than_200_scans) {
  Placement placement = whole(8, 8);
  DecodeScratch scratch;
  const auto all = jpeg_with_scans(200), too_many = jpeg_with_scans(201);
  EXPECT_EQ(pixels_of(decode_image(all, placement, scratch)).mean().item<double>(), 128);
  const auto decode = [&] { decode_image(too_many, placement, scratch); };
  EXPECT_TRUE(contains(message_of<DataError>(decode), "more than 200 scans"));
}

TEST(Jpeg, decodes_a_part_like_the_whole) {
  const auto pixels = smooth_pixels(200, 300, 2);
  const auto file = encode_jpeg(pixels, 200, 300, 90);
  DecodeScratch whole_scratch;
  Placement all = whole(200, 300);
  const auto complete = pixels_of(decode_image(file, all, whole_scratch)).clone();
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    const auto height = static_cast<int64_t>(1 + random() % 150);
    const auto width = static_cast<int64_t>(1 + random() % 200);
    const auto top = static_cast<int64_t>(random() % static_cast<unsigned>(201 - height));
    const auto left = static_cast<int64_t>(random() % static_cast<unsigned>(301 - width));
    Placement part = whole(height, width);
    part.box.top = static_cast<double>(top);
    part.box.left = static_cast<double>(left);
    DecodeScratch scratch;
    const auto found = pixels_of(decode_image(file, part, scratch));
    const auto y = static_cast<int64_t>(part.box.top);
    const auto x = static_cast<int64_t>(part.box.left);
    const auto difference = (found.slice(0, y, y + height).slice(1, x, x + width) -
                             complete.slice(0, top, top + height).slice(1, left, left + width))
                                .abs();
    ASSERT_LE(difference.max().item<float>(), 8) << top << ' ' << left << ' ' << height << ' ' << width;
    ASSERT_LE(difference.mean().item<float>(), 1);
  }
}

TEST(Jpeg, decodes_at_a_smaller_scale_for_a_small_result) {
  const auto pixels = smooth_pixels(512, 512, 4);
  const auto file = encode_jpeg(pixels, 512, 512, 95);
  Placement placement = whole(512, 512);
  placement.height = placement.width = 64;
  DecodeScratch scratch;
  const ImageView view = decode_image(file, placement, scratch);
  EXPECT_EQ(view.shape.height, 64);
  EXPECT_DOUBLE_EQ(placement.box.width, 64);
}

TEST(Png, decodes_every_colour_type_to_rgb) {
  const auto rgb = smooth_pixels(9, 11, 5);
  DecodeScratch scratch;
  const auto file = encode_png(rgb, 9, 11);
  Placement placement = whole(9, 11);
  const ImageView view = decode_image(file, placement, scratch);
  EXPECT_EQ(scratch, rgb);
  EXPECT_EQ(view.shape, (ImageShape{3, 9, 11}));
  const auto grey = encode_png(std::vector<uint8_t>(99, 77), 9, 11, PNG_FORMAT_GRAY);
  decode_image(grey, placement, scratch);
  EXPECT_EQ(scratch, std::vector<uint8_t>(297, 77));
}

TEST(ImageFolder, numbers_classes_by_name_and_reads_both_formats) {
  const TempFolder folder;
  write_image_folder(folder / "train", 5);
  const auto source = std::make_shared<ImageFolder>(folder / "train");
  EXPECT_EQ(source->class_names(), (std::vector<std::string>{"a", "b"}));
  ASSERT_EQ(source->size(), 10);
  const ImageDataset data(source, {.height = 24, .width = 24, .shorter_edge = 32, .crop = Crop::kCentre});
  std::vector<int64_t> all(10);
  std::iota(all.begin(), all.end(), 0);
  const Batch batch = data.make_batch(all);
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{10, 3, 24, 24}));
  EXPECT_TRUE(torch::equal(batch.target, torch::tensor({0, 0, 0, 0, 0, 1, 1, 1, 1, 1}, torch::kInt64)));
  // The middle of the first image, resized.
  const auto pixels = smooth_pixels(40, 40, 0);
  EXPECT_NEAR(
      batch.data[0][0].mean().item<float>() * 255,
      [&] {
        double sum = 0;
        for (int y = 5; y < 35; ++y)
          for (int x = 5; x < 35; ++x) sum += pixels[to_size((y * 40 + x) * 3)];
        return sum / 900;
      }(),
      3);
}

TEST(ImageFolder, refuses_missing_and_empty_classes) {
  const TempFolder folder;
  EXPECT_TRUE(contains(message_of<DataError>([&] { ImageFolder(folder / "none"); }), "no class folders"));
  write_image_folder(folder / "train", 2);
  std::filesystem::create_directories(folder / "train/c");
  EXPECT_TRUE(contains(message_of<DataError>([&] { ImageFolder(folder / "train"); }), "class c has no images"));
  EXPECT_TRUE(contains(message_of<DataError>([&] {
                         ImageFolder(folder / "train", {"a", "z"});
                       }),
                       "class z has no images"));
}

TEST(ImageFolder, follows_links_but_not_in_circles) {
  namespace fs = std::filesystem;
  const TempFolder folder;
  write_image_folder(folder / "elsewhere", 3);
  fs::create_directories(folder / "train/a/deep");
  fs::create_directory_symlink(folder / "elsewhere/b", folder / "train/b");               // a class
  fs::create_directory_symlink(folder / "elsewhere/a", folder / "train/a/deep/more");     // a folder
  fs::create_symlink(folder / "elsewhere/b/0.jpg", folder / "train/a/one.jpg");           // an image
  fs::create_directory_symlink(folder / "train/a", folder / "train/a/deep/circle");       // back to its own folder
  fs::create_directory_symlink(folder / "train", folder / "elsewhere/a/another_circle");  // a longer way back
  fs::create_directory_symlink(folder / "train", folder / "train/a/all_classes");         // b's images are not a's
  fs::create_symlink(folder / "train/a/itself.jpg", folder / "train/a/itself.jpg");
  const ImageFolder images(folder / "train");
  EXPECT_EQ(images.class_names(), (std::vector<std::string>{"a", "b"}));
  std::vector<std::string> origins;
  for (int64_t i = 0; i < images.size(); ++i)
    origins.push_back(fs::path(images.origin(i)).lexically_relative(folder / "train"));
  const auto count = [&](const std::string& origin) { return std::ranges::count(origins, origin); };
  EXPECT_EQ(count("a/one.jpg"), 1);
  EXPECT_EQ(count("a/deep/more/0.jpg"), 1);
  EXPECT_EQ(count("b/0.jpg"), 1);
  EXPECT_EQ(origins.size(), 2U + 3U + 3U) << ::testing::PrintToString(origins);
  std::vector<uint8_t> scratch;
  EXPECT_THROW(images.read(std::ranges::find(origins, "a/itself.jpg") - origins.begin(), scratch), DataError);
}

TEST(ImageFolder, refuses_a_named_pipe_among_the_images) {
  const TempFolder folder;
  write_image_folder(folder.path(), 2);
  ASSERT_EQ(::mkfifo(folder.file("a/00.jpg").c_str(), 0600), 0);
  const ImageDataset data(std::make_shared<ImageFolder>(folder.path()), {.height = 16, .width = 16});
  const std::vector<int64_t> second = {1};
  const std::string message = message_of<DataError>([&] { data.make_batch(second); });
  EXPECT_TRUE(contains(message, "not a regular file"));
  EXPECT_TRUE(contains(message, "a/00.jpg"));
}

TEST(ImageFolder, skips_bad_images_or_names_file_and_sample) {
  const TempFolder folder;
  write_image_folder(folder.path(), 4);
  const std::string cut = read_file(folder / "a/2.jpg");
  write_file(folder / "a/2.jpg", cut.substr(0, cut.size() / 2));
  write_file(folder / "b/1.PNG", "no image at all");
  std::filesystem::permissions(folder / "b/3.PNG", std::filesystem::perms::none);
  std::filesystem::remove(folder / "b/3.PNG");
  write_file(folder / "b/3.PNG", "");
  const auto dataset = std::make_shared<ImageDataset>(std::make_shared<ImageFolder>(folder.path()),
                                                      ImageTransforms{.height = 16, .width = 16});
  const auto load = [&](int64_t skip) {
    Loader loader(World::single(), dataset, {.batch_size = 3, .shuffle = false, .skip_bad = skip});
    for (const Batch& batch : loader.epoch(0)) EXPECT_LE(batch.size(), 3);
    return loader.statistics();
  };
  const std::string message = message_of<DataError>([&] { load(0); });
  EXPECT_TRUE(contains(message, "sample 2 of"));
  EXPECT_TRUE(contains(message, "damaged JPEG"));
  EXPECT_TRUE(contains(message, "a/2.jpg"));
  EXPECT_TRUE(contains(message_of<DataError>([&] { load(2); }), "3 bad samples in this epoch, 2 may be skipped"));
  EXPECT_EQ(load(3).skipped, 3);
  EXPECT_EQ(load(3).samples, 5);
}

TEST(ImageFolder, refuses_images_of_different_sizes_unless_given_a_size) {
  const TempFolder folder;
  write_image_folder(folder.path(), 2);
  const auto both = open_dataset({.data = "imagefolder:" + folder.path() + "/"});
  const std::vector<int64_t> all = {0, 1};
  const std::string message = message_of<DataError>([&] { both.train->make_batch(all); });
  EXPECT_TRUE(contains(message, "has 3 x 43 x 41 values, the others 3 x 40 x 40"));
}

}  // namespace
}  // namespace lockstep
